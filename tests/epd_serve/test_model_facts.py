"""What a model directory tells the launcher before any stage starts, and which layouts it rules out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd_serve.engine.argv import stage_command
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.model_facts import CPU_LIMITS, ModelFacts, check_model_fits, modalities, read_model_facts
from epd_serve.roles import Role
from epd_serve.stage_plan import StagePlan
from epd_serve.wiring import StageWiring

QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {"max_position_embeddings": 8192},
    "vision_config": {"depth": 3},
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "float16", "max_position_embeddings": 40960}


def model(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def facts(folder: Path, config: dict[str, Any]) -> ModelFacts:
    found = read_model_facts(model(folder, config))
    assert found is not None
    return found


def test_a_vision_model_and_its_limits_are_read(tmp_path: Path) -> None:
    found = facts(tmp_path, QWEN3_VL)
    assert (found.architecture, found.multimodal) == ("Qwen3VLForConditionalGeneration", True)
    assert (found.max_positions, found.dtype) == (8192, "bfloat16")


def test_a_text_model_is_text_only(tmp_path: Path) -> None:
    found = facts(tmp_path, QWEN3)
    assert (found.multimodal, found.max_positions, found.dtype) == (False, 40960, "float16")


@pytest.mark.parametrize(
    ("config", "multimodal"),
    [
        ({"architectures": ["MolmoForCausalLM"], "vision_backbone": {}}, True),
        ({"architectures": ["Phi3VForCausalLM"], "img_processor": {"name": "clip"}}, True),
        ({"architectures": ["Qwen2_5OmniModel"], "thinker_config": {"audio_config": {}, "text_config": {}}}, True),
        ({"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True, "num_mel_bins": 80}, True),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, False),
        ({"architectures": ["LlamaForCausalLM"], "vision_config": None}, False),
        ({}, False),
    ],
)
def test_towers_are_recognised_by_what_the_config_holds(
    tmp_path: Path, config: dict[str, Any], multimodal: bool
) -> None:
    assert facts(tmp_path, config).multimodal is multimodal


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-VL-3B-Instruct", "gpt2"])
def test_a_hub_name_passes_through(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_model_facts(name) is None
    check_model_fits(None, parse("(E-P)-D"))


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "../model", "~/no-such-model", "models/typo"])
def test_a_missing_directory_is_one_line(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="does not exist") as refused:
        read_model_facts(path)
    assert "\n" not in str(refused.value)


def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_model_facts(str(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model_facts(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_model_facts(str(tmp_path))
    with pytest.raises(ConfigError, match="is a file"):
        read_model_facts(str(tmp_path / "config.json"))


def test_a_text_only_model_under_encoders_is_told_the_layout_to_use(tmp_path: Path) -> None:
    found = facts(tmp_path, QWEN3)
    with pytest.raises(ConfigError, match=r"use --layout P-D$"):
        check_model_fits(found, parse("(E-P)-D"))
    with pytest.raises(ConfigError, match=r"use --layout PD$"):
        check_model_fits(found, parse("E-PD"))


def test_a_text_only_model_may_use_layouts_without_encoders(tmp_path: Path) -> None:
    found = facts(tmp_path, QWEN3)
    for spec in ("P-D", "PD", "TP1", "EP-D"):
        check_model_fits(found, parse(spec))


@pytest.mark.parametrize(
    ("config", "towers"),
    [
        (QWEN3_VL, {"image", "video"}),
        (QWEN3, set()),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, {"image"}),
        ({"architectures": ["InternVLForConditionalGeneration"], "vision_config": {}}, {"image", "video"}),
        ({"architectures": ["SomeNewVLM"], "vision_config": {}, "video_token_id": 7}, {"image", "video"}),
        ({"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {}}, {"audio"}),
        (
            {"architectures": ["Qwen2_5OmniModel"], "thinker_config": {"audio_config": {}, "vision_config": {}}},
            {"image", "video", "audio"},
        ),
        ({"architectures": ["MysteryForConditionalGeneration"]}, None),
    ],
)
def test_what_a_model_takes_is_read_from_its_config(
    tmp_path: Path, config: dict[str, Any], towers: set[str] | None
) -> None:
    assert facts(tmp_path, config).towers == towers


@pytest.mark.parametrize(
    ("device", "stage_args", "taken"),
    [
        ("npu", "", {"image", "video"}),
        ("cpu", "", {"image"}),
        ("cpu", """--limit-mm-per-prompt {"image":1,"video":1}""", {"image", "video"}),
        ("cpu", """--limit_mm_per_prompt={"image":2}""", {"image", "video"}),
        ("npu", """--limit-mm-per-prompt {"image":0}""", {"video"}),
        ("npu", """--limit-mm-per-prompt {"video":{"count":0}}""", {"image"}),
        ("npu", "--limit-mm-per-prompt.video 0", {"image"}),
        ("npu", "--language-model-only", set()),
    ],
)
def test_what_a_stage_takes_follows_its_flags_and_device(
    tmp_path: Path, device: str, stage_args: str, taken: set[str]
) -> None:
    assert modalities(facts(tmp_path, QWEN3_VL), stage_args.split(), device) == taken


def test_the_modalities_of_a_hub_name_are_unknown() -> None:
    assert modalities(None, (), "cpu") is None


def test_cpu_stages_are_started_with_the_limits_that_are_assumed() -> None:
    wiring = StageWiring("EPD0", Role.EPD, "i")
    plan = StagePlan("EPD0", Role.EPD, "cpu", (0,), (), 1, "m", "m", 1, "127.0.0.1", wiring)
    argv = stage_command(plan).argv
    assert json.loads(argv[argv.index("--limit-mm-per-prompt") + 1]) == CPU_LIMITS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("preprocessor_config.json", '{"max_pixels": 1}'),
        ("video_preprocessor_config.json", '{"fps": 1}'),
        ("tokenizer_config.json", "{}"),
        ("modeling_own.py", "pass"),
        ("model.safetensors", "weights"),
    ],
)
def test_another_file_that_shapes_features_is_another_revision(tmp_path: Path, name: str, content: str) -> None:
    without = facts(tmp_path, QWEN3_VL).revision
    (tmp_path / name).write_text(content)
    first = facts(tmp_path, QWEN3_VL).revision
    (tmp_path / name).write_text(content + " ")
    second = facts(tmp_path, QWEN3_VL).revision
    assert len({without, first, second}) == 3


def test_copies_of_a_model_have_one_revision_and_readmes_do_not_count(tmp_path: Path) -> None:
    revisions = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "preprocessor_config.json").write_text("{}")
        (tmp_path / name / "README.md").write_text(name)
        revisions.add(facts(tmp_path / name, QWEN3_VL).revision)
    assert len(revisions) == 1
