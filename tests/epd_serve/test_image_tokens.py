"""Tokens of pictures: each rule equals what the model's own processor says, over sizes of all proportions."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd_serve.image_tokens import ByArea, Fitted, ImageTokens, Resized, Tiled, image_tokens
from epd_serve.largest_items import ProcessorConfigs
from tests.demo_model.architecture import MAX_PIXELS, MIN_PIXELS, picture_grid
from tests.epd_serve import own_processors

SITE = Path(__file__).parents[2] / "epd_serve/engine/site"
SIZES = [
    (width, height)
    for width in (1, 28, 113, 224, 336, 448, 640, 802, 1280, 1920, 4096)
    for height in (37, 224, 336, 449, 652, 720, 1080, 3112)
    if max(width, height) / min(width, height) < 100
]
SQUARES = {"patch_size": 14, "image_size": 336, "model_type": "clip_vision_model"}
GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
QWEN = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
INTERNVL = {
    "model_type": "internvl",
    "image_seq_length": 256,
    "vision_config": {"patch_size": [14, 14], "image_size": 448},
}
TILES = {"size": {"height": 448, "width": 448}, "max_patches": 12, "min_patches": 1, "crop_to_patches": True}
CHAT = {
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "force_image_size": 448,
    "use_thumbnail": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
    "dynamic_image_size": True,
    "vision_config": {"patch_size": 14, "image_size": 448},
}
LLAVA = {"model_type": "llava", "vision_config": SQUARES, "vision_feature_select_strategy": "default"}
NEXT = {**LLAVA, "model_type": "llava_next", "image_grid_pinpoints": GRIDS}
ONEVISION = {
    "model_type": "llava_onevision",
    "vision_config": {"patch_size": 14, "image_size": 384, "model_type": "siglip_vision_model"},
    "vision_feature_select_strategy": "full",
    "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("qwen", QWEN, {"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "patch_size": 14, "merge_size": 2}, {}),
    ("qwen", QWEN, {"size": {"shortest_edge": 65536, "longest_edge": 1048576}, "patch_size": 16, "merge_size": 2}, {}),
    ("qwen", QWEN, {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14}, {"max_pixels": 501760}),
    ("internvl", INTERNVL, TILES, {}),
    ("internvl", INTERNVL, {**TILES, "min_patches": 2, "max_patches": 6}, {}),
    ("internvl", INTERNVL, TILES, {"crop_to_patches": False}),
    ("internvl_chat", CHAT, {}, {}),
    ("internvl_chat", {**CHAT, "use_thumbnail": False}, {}, {"max_dynamic_patch": 12}),
    ("internvl_chat", {**CHAT, "dynamic_image_size": False}, {}, {}),
    ("llava", LLAVA, {}, {}),
    ("llava", {**LLAVA, "vision_feature_select_strategy": "full"}, {}, {}),
    ("llava", NEXT, {}, {}),
    ("llava", ONEVISION, {}, {}),
]


def rule(
    config: dict[str, Any], image: dict[str, Any] | None = None, overrides: dict[str, Any] | None = None
) -> ImageTokens:
    return image_tokens(ProcessorConfigs(config, image or {}, {}, overrides or {}))


@pytest.mark.slow  # transformers and vLLM take many seconds to import
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
def test_each_rule_says_what_the_model_s_own_processor_says() -> None:
    asked = subprocess.run(
        [sys.executable, own_processors.__file__],
        input=json.dumps([CASES, SIZES]),
        env={**os.environ, "PYTHONPATH": str(SITE)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert asked.returncode == 0, asked.stderr
    for (kind, config, image, overrides), counts in zip(CASES, json.loads(asked.stdout), strict=True):
        own = rule(config, image, overrides)
        assert [own.tokens(*size) for size in SIZES] == counts, (kind, own)


@pytest.mark.parametrize(
    ("width", "height", "tokens"), [(280, 280, 100), (1280, 720, 1196), (1920, 1080, 2691), (4096, 3112, 16206)]
)
def test_a_resized_picture_has_the_tokens_that_epd_serve_s_table_3_prints(width: int, height: int, tokens: int) -> None:
    assert rule(QWEN, CASES[0][2]).tokens(width, height) == tokens


def test_a_picture_of_4k_is_thirteen_tiles_for_internvl_and_one_size_for_llava() -> None:
    assert isinstance(rule(INTERNVL, TILES), Tiled) and rule(INTERNVL, TILES).tokens(4096, 3112) == 13 * 256
    assert isinstance(rule(LLAVA), Fitted) and rule(LLAVA).tokens(4096, 3112) == rule(LLAVA).tokens(10, 10) == 576
    assert rule(NEXT).tokens(672, 672) == 576 + 48 * 48 + 48


def test_the_demo_model_s_pictures_are_known_from_its_configs() -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
    image = {"size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}, "patch_size": 16, "merge_size": 2}
    for width, height in SIZES:
        rows, columns = picture_grid(width, height)
        assert rule(config, image).tokens(width, height) == rows * columns // 4


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "qwen3_vl"},
        {**LLAVA, "vision_config": {"model_type": "pixtral", "patch_size": 16, "image_size": 1024}},
        {"model_type": "llava_next", "vision_config": SQUARES},
        {"model_type": "minicpmv", "vision_config": {"patch_size": 14, "image_size": 980}},
    ],
)
def test_a_model_without_a_known_rule_counts_by_area(config: dict[str, Any]) -> None:
    assert rule(config) == ByArea() and rule(config).tokens(280, 280) == 100 and rule(config).tokens(1, 1) == 1


@pytest.mark.parametrize("own", [ByArea(), rule(QWEN), rule(CHAT), rule(NEXT)])
def test_a_rule_travels_to_other_processes(own: ImageTokens) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(own), type=ImageTokens) == own


def test_what_a_config_leaves_open_is_as_the_processor_has_it() -> None:
    assert rule(QWEN) == Resized(28, 3136, 1003520)
