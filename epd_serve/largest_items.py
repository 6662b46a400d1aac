"""The largest picture, clip or sound that an encoder can be given: how many patches, how many tokens. Pure.

vLLM asks each model's processor for it (`get_mm_max_tokens_per_item`, `get_dummy_mm_data`) and profiles an engine with
it. The same answer is worked out here from config.json and the processor's configs, before any process starts, for
three ways of taking pictures: by a bound on pixels (Qwen-VL, openPangu-VL), by tiles (InternVL, LLaVA-NeXT,
LLaVA-OneVision), by one size (LLaVA). Where a family does it another way, a clip counts as long as a prompt may be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from epd_serve.model_sizes import ModelSizes, TowerSizes, number

_QWEN_PIXELS = 28 * 28 * 1280  # of `Qwen2VLImageProcessor` where its config names no bound
_QWEN2_CLIP_FRAMES = 14  # `_MAX_FRAMES_PER_VIDEO` of vLLM's qwen2_vl.py, two frames to a patch
_ONEVISION_CLIP_FRAMES = 16  # the same of llava_onevision.py
_LONGEST_EDGE_IN_PIXELS = 10_000  # Qwen's `longest_edge` is an area, Pixtral's a length: no picture is that wide


@dataclass(frozen=True)
class LargestItem:
    """Attributes:
    modality: `image`, `video` or `audio`. tower: which encoder takes it, a key of `ModelSizes.towers`.
    patches: that go through the tower. tokens: that come out.
    """

    modality: str
    tower: str
    patches: int
    tokens: int


@dataclass(frozen=True)
class ProcessorConfigs:
    """What says how large an item may be.

    Attributes:
        config: config.json. image, video: preprocessor_config.json, video_preprocessor_config.json, {} without one.
        overrides: of `--mm-processor-kwargs`.
    """

    config: Mapping[str, Any]
    image: Mapping[str, Any]
    video: Mapping[str, Any]
    overrides: Mapping[str, Any]


def largest_items(
    sizes: ModelSizes, processors: ProcessorConfigs, modalities: Collection[str] | None, max_tokens: int
) -> tuple[LargestItem, ...] | None:
    """The largest item of each modality; None where the configs do not tell for one that is taken.

    Args:
        modalities: those that the stage takes; None: all that it has a tower for.
        max_tokens: of a prompt, which no item exceeds.
    """
    items: list[LargestItem] = []
    vision, audio = sizes.towers.get("vision"), sizes.towers.get("audio")
    taken = set(modalities if modalities is not None else _by_towers(sizes))
    if taken & {"image", "video"}:
        picture = _picture(vision, processors) if vision is not None else None
        if vision is None or picture is None:
            return None
        if "image" in taken:
            items.append(picture)
        if "video" in taken:
            items.append(_clip(vision, picture, processors, max_tokens))
    if "audio" in taken:
        if audio is None:
            return None
        positions = number(_part(processors.config, "audio_config"), "max_source_positions") or 1500
        items.append(LargestItem("audio", "audio", positions, -(-positions // audio.merge)))
    return tuple(items)


def picture_pixels(processors: ProcessorConfigs) -> int | None:
    """The bound on a picture's pixels, where the processor has one."""
    for section in (processors.overrides, _part(processors.overrides, "images_kwargs"), processors.image):
        if (pixels := number(section, "max_pixels")) is not None:
            return pixels
        longest = number(_part(section, "size"), "longest_edge")
        if longest is not None:
            return longest if longest >= _LONGEST_EDGE_IN_PIXELS else longest**2
    vision = _part(processors.config, "vision_config")
    return _QWEN_PIXELS if "spatial_merge_size" in vision and "temporal_patch_size" in vision else None


def _picture(tower: TowerSizes, processors: ProcessorConfigs) -> LargestItem | None:
    vision = _part(processors.config, "vision_config")
    patch = number(vision, "patch_size")
    assert patch is not None, "a tower has one"
    tile = number(vision, "image_size") or number(_part(processors.image, "size"), "height", "shortest_edge")
    tiles = _tiles(tile, processors) if tile is not None else None
    pixels = picture_pixels(processors)
    if tiles is None and pixels is not None:
        patches = pixels // patch**2
    elif tile is not None:
        patches = (tiles or 1) * ((tile // patch) ** 2 + 1)  # and a class token
    else:
        return None
    return LargestItem("image", "vision", patches, max(1, patches // tower.merge))


def _tiles(tile: int, processors: ProcessorConfigs) -> int | None:
    """Tiles of the largest picture, the thumbnail included; None for a model without tiles."""
    for section in (processors.overrides, processors.config, processors.image):
        most = number(section, "max_dynamic_patch", "max_patches")
        if most is not None:
            return most + (1 if most > 1 else 0)
        pinpoints = section.get("image_grid_pinpoints")
        if isinstance(pinpoints, list) and pinpoints:
            return 1 + max(max(1, int(height) // tile) * max(1, int(width) // tile) for height, width in pinpoints)
    return None


def _clip(tower: TowerSizes, picture: LargestItem, processors: ProcessorConfigs, max_tokens: int) -> LargestItem:
    kind = str(processors.config.get("model_type", ""))
    longest = number(_part(processors.video, "size"), "longest_edge")
    patch = number(_part(processors.config, "vision_config"), "patch_size") or 1
    if kind.startswith(("qwen3", "qwen_3")) and longest is not None:
        tokens = longest // 2 // patch**2 // tower.merge  # two frames to a patch
    elif kind.startswith(("qwen2", "openpangu")) and picture.tokens:
        # As many frames as a prompt has room for, at most 14, and one where there is room for none.
        tokens = picture.tokens * max(1, min(_QWEN2_CLIP_FRAMES // 2, max_tokens // picture.tokens))
    elif kind == "llava_onevision":
        frame = (number(_part(processors.config, "vision_config"), "image_size") or patch) // patch
        return LargestItem("video", "vision", _ONEVISION_CLIP_FRAMES * frame**2, _ONEVISION_CLIP_FRAMES * frame**2 // 4)
    else:
        tokens = max_tokens
    return LargestItem("video", "vision", tokens * tower.merge, tokens)


def _by_towers(sizes: ModelSizes) -> set[str]:
    return {{"vision": "image"}.get(tower, tower) for tower in sizes.towers}


def _part(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = section.get("thinker_config")
    if key not in section and isinstance(inner, dict):
        section = inner
    part = section.get(key)
    return part if isinstance(part, dict) else {}
