"""Weights by part, from headers alone: layouts of real families with synthetic shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_serve.errors import ConfigError
from epd_serve.model_weights import ModelWeights, part_of, read_model_weights
from tests.checkpoints import qwen25_vl_7b, write_safetensors


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("visual.blocks.0.attn.qkv.weight", "tower"),  # Qwen2-VL, Qwen2.5-VL
        ("visual.merger.mlp.0.weight", "tower"),
        ("model.layers.0.mlp.up_proj.weight", "language"),
        ("lm_head.weight", "language"),
        ("model.visual.deepstack_merger_list.0.linear_fc1.weight", "tower"),  # Qwen3-VL, openPangu-VL
        ("model.language_model.layers.0.mlp.up_proj.weight", "language"),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "tower"),  # LLaVA
        ("multi_modal_projector.linear_1.weight", "tower"),
        ("image_newline", "tower"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "language"),
        ("model.vision_tower.encoder.layer.0.mlp.fc1.weight", "tower"),  # InternVL in Transformers
        ("model.multi_modal_projector.linear_1.weight", "tower"),
        ("vision_model.encoder.layers.0.mlp.fc1.weight", "tower"),  # InternVL as published
        ("mlp1.1.weight", "tower"),
        ("audio_tower.layers.0.fc1.weight", "tower"),  # Qwen2-Audio
        ("thinker.visual.blocks.0.attn.qkv.weight", "tower"),  # Qwen2.5-Omni
        ("thinker.model.layers.0.mlp.up_proj.weight", "language"),
        ("talker.model.layers.0.mlp.up_proj.weight", "unused"),
        ("mtp.layers.0.mlp.up_proj.weight", "unused"),
    ],
)
def test_a_name_tells_the_part_it_belongs_to(name: str, part: str) -> None:
    assert part_of(name) == part


def test_the_parts_of_a_7b_model_add_up_to_its_published_size(tmp_path: Path) -> None:
    found = read_model_weights(qwen25_vl_7b(tmp_path), element_bytes=2)
    assert found is not None
    assert found.tower == pytest.approx(1.35e9, rel=0.02)  # 0.68 billion parameters
    assert found.language == pytest.approx(15.23e9, rel=0.01)  # 7.62 billion


def test_float32_weights_are_cast_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"visual.a": (4, 4), "lm_head.weight": (8,)}, "F32")
    assert read_model_weights(tmp_path, element_bytes=2) == ModelWeights(tower=32, language=16)
    assert read_model_weights(tmp_path, element_bytes=2, quantised=True) == ModelWeights(tower=64, language=32)


def test_what_is_stored_in_eight_bits_stays_there(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": (10, 10)}, "F8_E4M3")
    assert read_model_weights(tmp_path, element_bytes=2) == ModelWeights(tower=0, language=100)


def test_a_tied_output_layer_is_not_loaded_twice(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (100,), "lm_head.weight": (100,)}
    write_safetensors(tmp_path / "model.safetensors", shapes)
    assert read_model_weights(tmp_path, element_bytes=2, tied=True) == ModelWeights(tower=0, language=200)
    assert read_model_weights(tmp_path, element_bytes=2) == ModelWeights(tower=0, language=400)


def sharded(folder: Path) -> Path:
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"visual.a": (10,)})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"model.b": (20,)})
    names = {"visual.a": "model-00001-of-00002.safetensors", "model.b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    write_safetensors(sharded(tmp_path) / "left-over.safetensors", {"model.c": (1000,)})
    assert read_model_weights(tmp_path, element_bytes=2) == ModelWeights(tower=20, language=40)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors.*1 of 2 files"):
        read_model_weights(tmp_path, element_bytes=2)


def test_mistrals_second_copy_counts_only_when_it_is_the_only_one(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "consolidated.safetensors", {"layers.0.w": (10,)})
    assert read_model_weights(tmp_path, element_bytes=2) == ModelWeights(tower=0, language=20)
    write_safetensors(tmp_path / "model.safetensors", {"model.layers.0.w": (30,)})
    assert read_model_weights(tmp_path, element_bytes=2) == ModelWeights(tower=0, language=60)


def test_other_formats_tell_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 100)
    assert read_model_weights(tmp_path, element_bytes=2) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"<html>not found</html>", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        ((50).to_bytes(8, "little") + b"{}", "cut short"),
        ((2).to_bytes(8, "little") + b"[]", "no safetensors header"),
        ((9).to_bytes(8, "little") + b'{"a": 12}', "no safetensors header"),
    ],
)
def test_a_broken_file_is_refused_with_what_to_do(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_model_weights(tmp_path, element_bytes=2)


def test_an_interrupted_download_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"model.a": (100,)})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(ConfigError, match="cut short"):
        read_model_weights(tmp_path, element_bytes=2)
