"""How many tokens an encoder makes of a picture of a size, by the rule of the model's own processor. Pure.

The processor itself needs transformers; its rule is in config.json and the processor's configs. Four ways of taking
pictures are known: resized within bounds on pixels (Qwen2-VL to Qwen3-VL, openPangu-VL), cut into equal tiles
(InternVL), fitted into one of some grids of tiles (LLaVA-NeXT, LLaVA-OneVision), one size (LLaVA). Tests hold each
equal to the model's processor. Elsewhere tokens grow with the area, which is right to the order of magnitude.

What placing work needs is that costs are right relative to each other and to what stages report, which count real
tokens. A request's own processor options are not looked at.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from epd_serve.largest_items import ProcessorConfigs
from epd_serve.model_sizes import number

PIXELS_PER_TOKEN = 784
"""28 x 28 pixels, a merged patch of Qwen2-VL and 2.5-VL: for models of which no rule is known."""

_QWEN_MIN_PIXELS, _QWEN_MAX_PIXELS = 56 * 56, 28 * 28 * 1280  # of `Qwen2VLImageProcessor` where its config has none


_CLIPS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Towers that take one size, and their class tokens."""
_ONEVISION_TILES = 9  # `anyres_max_9`


class ByArea(Struct, frozen=True, tag=True):
    """A guess."""

    pixels_per_token: int = PIXELS_PER_TOKEN

    def tokens(self, width: int, height: int) -> int:
        return max(1, round(width * height / self.pixels_per_token))


class Resized(Struct, frozen=True, tag=True):
    """To whole tokens of `side` pixels each way, within bounds on all pixels (`smart_resize` of transformers' Qwen2-VL;
    a picture 200 times as long as wide is refused there, and counts here as any other)."""

    side: int
    min_pixels: int
    max_pixels: int

    def tokens(self, width: int, height: int) -> int:
        side = self.side
        columns, rows = round(width / side), round(height / side)
        if columns * rows * side**2 > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            columns, rows = (max(1, math.floor(one / shrink / side)) for one in (width, height))
        elif columns * rows * side**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            columns, rows = (math.ceil(one * grow / side) for one in (width, height))
        return columns * rows


class Tiled(Struct, frozen=True, tag=True):
    """Into the number of square tiles that has the picture's proportions best (InternVL).

    Attributes:
        side: of a tile, in pixels. tokens_each: of a tile. least, most: tiles.
        thumbnail: one more where there are several.
    """

    side: int
    tokens_each: int
    least: int
    most: int
    thumbnail: bool

    def tokens(self, width: int, height: int) -> int:
        return self.tokens_each * self.tiles(width, height)

    def tiles(self, width: int, height: int) -> int:
        """How many it is cut into, with the thumbnail."""
        nearest, best = math.inf, 1
        for columns, rows in _arrangements(self.least, self.most):
            tiles, off = columns * rows, abs(width / height - columns / rows)
            # Of equals the larger one, as long as the picture fills half of it.
            if off < nearest or (off == nearest and width * height > 0.5 * self.side**2 * tiles):
                nearest, best = off, tiles
        return best + (1 if self.thumbnail and best > 1 else 0)


class Fitted(Struct, frozen=True, tag=True):
    """Whole and once more in the grid of tiles that shows most of it, without the padding and with the end of each row
    (LLaVA-NeXT, LLaVA-OneVision). Without grids it is one size (LLaVA).

    Attributes:
        side: of a tile, in pixels. patches: of a tile, each way. base: tokens of the whole picture.
        grids: (height, width) in pixels.
        most_tiles: a grid's tokens are those of so many tiles at most (LLaVA-OneVision); 0 without a bound.
    """

    side: int
    patches: int
    base: int
    grids: tuple[tuple[int, int], ...] = ()
    most_tiles: int = 0

    def tokens(self, width: int, height: int) -> int:
        if not self.grids:
            return self.base
        grid_height, grid_width = max(self.grids, key=lambda grid: self._shown(grid, width, height))
        rows, columns = self.patches * (grid_height // self.side), self.patches * (grid_width // self.side)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        if self.most_tiles:
            over = math.sqrt(rows * columns / (self.most_tiles * self.patches**2))
            if over > 1.1:
                rows, columns = int(rows // over), int(columns // over)
        return self.base + rows * columns + rows

    @staticmethod
    def _shown(grid: tuple[int, int], width: int, height: int) -> tuple[int, int]:
        """How many of its pixels are left in a grid, and, of equals, how few of the grid's are not the picture's."""
        scale = min(grid[1] / width, grid[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - grid[0] * grid[1]


ImageTokens = ByArea | Resized | Tiled | Fitted


def tiles_of(rule: ImageTokens, width: int, height: int) -> int:
    """How many tiles of an image the tower takes each by itself; 1 where rows of its feature run across them."""
    return rule.tiles(width, height) if isinstance(rule, Tiled) else 1


@functools.lru_cache(maxsize=16)
def _arrangements(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """(columns, rows) of so many tiles, fewest first."""
    every = ((columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
    return tuple(sorted((one for one in every if one[0] * one[1] >= least), key=lambda one: one[0] * one[1]))


def image_tokens(processors: ProcessorConfigs) -> ImageTokens:
    """The rule of a model; `ByArea` where none is known, or its configs say too little."""
    config, image, overrides = processors.config, processors.image, processors.overrides
    kind = str(config.get("model_type", ""))
    vision = _part(config, "vision_config")
    patch, tile = number(vision, "patch_size"), number(vision, "image_size")
    if patch is None:
        return ByArea()
    if kind.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "openpangu")):
        return _resized(patch, vision, image, overrides)
    if tile is None:
        return ByArea()
    if kind == "internvl_chat":
        return _internvl_chat(patch, tile, config, overrides)
    if kind == "internvl":
        tile = number(_part(image, "size"), "height") or tile
        least, most = (number(overrides, name) or number(image, name) for name in ("min_patches", "max_patches"))
        tokens = number(config, "image_seq_length")
        cuts = overrides.get("crop_to_patches", image.get("crop_to_patches", True))
        return Tiled(tile, tokens or 256, least or 1, (most or 12) if cuts else 1, thumbnail=True)
    if kind in ("llava", "llava_next", "llava_onevision") and vision.get("model_type") in _CLIPS:
        return _fitted(patch, tile, kind, config)
    return ByArea()


def _resized(
    patch: int, vision: Mapping[str, Any], image: Mapping[str, Any], overrides: Mapping[str, Any]
) -> ImageTokens:
    patch = number(image, "patch_size") or patch
    merge = number(image, "merge_size") or number(vision, "spatial_merge_size") or 2
    places = (overrides, _part(overrides, "images_kwargs"), image)
    bounds = []
    for pixels, edge, usual in (
        ("min_pixels", "shortest_edge", _QWEN_MIN_PIXELS),
        ("max_pixels", "longest_edge", _QWEN_MAX_PIXELS),
    ):
        said = (number(place, pixels) or number(_part(place, "size"), edge) for place in places)
        bounds.append(next((one for one in said if one is not None), usual))
    return Resized(patch * merge, *bounds)


def _internvl_chat(patch: int, tile: int, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Tiled:
    said = {**config, **overrides}
    tile = number(said, "force_image_size") or tile
    least, most = number(said, "min_dynamic_patch") or 1, number(said, "max_dynamic_patch") or 6
    if not said.get("dynamic_image_size", True):
        least = most = 1
    each = int((tile // patch) ** 2 * float(said.get("downsample_ratio", 0.5)) ** 2)
    return Tiled(tile, each, least, most, bool(said.get("use_thumbnail", True)))


def _fitted(patch: int, tile: int, kind: str, config: Mapping[str, Any]) -> ImageTokens:
    grids = config.get("image_grid_pinpoints") if kind != "llava" else []
    if not isinstance(grids, list):
        return ByArea()
    onevision = kind == "llava_onevision"
    strategy = config.get("vision_feature_select_strategy", "full" if onevision else "default")
    tokens = (tile // patch) ** 2 + _CLIPS[str(_part(config, "vision_config")["model_type"])]
    base = tokens - 1 if strategy == "default" else tokens
    pairs = tuple((int(height), int(width)) for height, width in grids)
    return Fitted(tile, tile // patch, base, pairs, _ONEVISION_TILES if onevision else 0)


def _part(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = section.get(key)
    return part if isinstance(part, dict) else {}
