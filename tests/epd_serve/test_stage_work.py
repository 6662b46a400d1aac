"""How much a request computes in each stage, by what configs of real models say (their public config.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd_serve.demo.presets import builtin_model_dir
from epd_serve.stage_work import StageWork, read_stage_work

QWEN2_5_VL_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "patch_size": 14,
        "spatial_merge_size": 2,
    },
}


def work(tmp_path: Path, config: Any) -> StageWork | None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_stage_work(tmp_path)


def test_a_7b_model_by_hand(tmp_path: Path) -> None:
    """802x652 is 29x23 tokens of 28 pixels, 2668 patches; 677 tokens of prompt."""
    found = work(tmp_path, QWEN2_5_VL_7B)
    assert found is not None
    tower = 32 * (4 * 1280**2 + 3 * 1280 * 3420)
    layers = 28 * (3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944)
    head = 152064 * 3584
    assert found.encode == 2 * tower * 2668 + 4 * 32 * 1280 * 2668**2
    assert found.prefill == 2 * layers * 677 + 4 * 28 * 3584 * 677 * 677 / 2 + 2 * head
    assert found.decode == 2 * (layers + head) * 64 + 4 * 28 * 3584 * 64 * (677 + 32)
    assert tower == pytest.approx(0.63e9, rel=0.01) and layers == pytest.approx(6.5e9, rel=0.01)  # as published


def test_the_language_model_may_be_nested(tmp_path: Path) -> None:
    vision = QWEN2_5_VL_7B["vision_config"]
    text = {key: value for key, value in QWEN2_5_VL_7B.items() if key != "vision_config"}
    flat = work(tmp_path, QWEN2_5_VL_7B)
    assert work(tmp_path, {"text_config": text, "vision_config": vision}) == flat
    assert work(tmp_path, {"thinker_config": {"text_config": text, "vision_config": vision}}) == flat


def test_experts_count_as_often_as_they_are_used(tmp_path: Path) -> None:
    dense = work(tmp_path, QWEN2_5_VL_7B)
    experts = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 18944 // 2}
    assert work(tmp_path, {**QWEN2_5_VL_7B, **experts}) == dense


def test_a_tower_of_one_size_and_without_gates(tmp_path: Path) -> None:
    vision = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096, "patch_size": 14}
    found = work(tmp_path, {**QWEN2_5_VL_7B, "vision_config": {**vision, "image_size": 336}})
    assert found is not None
    assert found.encode == 2 * 24 * (4 * 1024**2 + 2 * 1024 * 4096) * 576 + 4 * 24 * 1024 * 576**2


@pytest.mark.parametrize(
    "config",
    [
        {},
        [],
        {"vision_config": {}},
        {key: value for key, value in QWEN2_5_VL_7B.items() if key != "vision_config"},
        {**QWEN2_5_VL_7B, "hidden_size": "3584"},
        {**QWEN2_5_VL_7B, "num_attention_heads": 0},
        {**QWEN2_5_VL_7B, "vision_config": {**QWEN2_5_VL_7B["vision_config"], "patch_size": None}},
    ],
)
def test_a_config_that_does_not_say_enough_is_unknown_and_said_to_be(
    tmp_path: Path, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert work(tmp_path, config) is None
    assert f"{tmp_path}: how much each stage computes is not known" in caplog.text


def test_no_config_is_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_stage_work(tmp_path) is None
    assert "FileNotFoundError" in caplog.text


def test_the_demo_model_is_known() -> None:
    assert read_stage_work(Path(builtin_model_dir())) is not None
