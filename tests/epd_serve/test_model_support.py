"""Which architectures may encode apart: the launcher's table, and the installed vLLM's source that it came from."""

from __future__ import annotations

import importlib.util

import pytest

from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.model_support import (
    ENCODER_FREE,
    NOT_ENCODER_FREE,
    REFUSED,
    TESTED,
    check_encoder_free,
    check_encoders_fit,
    left_out,
    undecodable,
    why_not_apart,
)
from tests.e2e.engine_facts import METADATA_TRAVELS

QWEN = "Qwen2_5_VLForConditionalGeneration"


def test_an_encoder_that_reads_the_language_model_is_refused_with_layouts_that_work() -> None:
    with pytest.raises(ConfigError, match=r"Molmo2ForConditionalGeneration .* use --layout EP-D or TP1$"):
        check_encoders_fit("Molmo2ForConditionalGeneration", parse("(E-P)-D"))
    for layout in ("EP-D", "PD", "TP1"):
        assert check_encoders_fit("Molmo2ForConditionalGeneration", parse(layout)) is None


def test_cross_attention_leaves_only_the_monolith() -> None:
    with pytest.raises(ConfigError, match=r"cross-attention.* use --layout TP1$"):
        check_encoders_fit("WhisperForConditionalGeneration", parse("E-PD"))


def test_one_modality_may_be_left_out() -> None:
    layout = parse("(E-P)-D")
    assert why_not_apart("NemotronH_Nano_VL_V2", "image") is None
    assert set(left_out("NemotronH_Nano_VL_V2", layout, ("image", "video"))) == {"video"}
    assert left_out("NemotronH_Nano_VL_V2", parse("EP-D"), ("image", "video")) == {}
    assert "serves no video" in (check_encoders_fit("NemotronH_Nano_VL_V2", layout) or "")


def test_an_untested_architecture_is_served_with_a_warning() -> None:
    assert "not among the tested" in (check_encoders_fit("BrandNewForConditionalGeneration", parse("E-P-D")) or "")
    assert check_encoders_fit("BrandNewForConditionalGeneration", parse("EP-D")) is None
    assert check_encoders_fit("", parse("E-P-D")) is None


@pytest.mark.parametrize(
    ("layout", "architecture", "vllm", "said"),
    [
        ("EP-D", QWEN, (0, 32), "EP of EP-D encodes beside .* use --layout E-P-D or E-PD"),
        ("TP1", QWEN, (0, 32), r"TP \(EPD\) of EPD encodes beside"),
        ("P-D", QWEN, (0, 32), "P-D has no E, .* use --layout E-P-D"),
        ("E-P-D", QWEN, (0, 23), "vLLM 0.23 takes no item without its pixels.* 0.32 does"),
        ("E-P-D", "InternVLForConditionalGeneration", (0, 32), "InternVLFor.* pixels .*embedding_fields"),
        ("E-PD", "LlavaOnevisionForConditionalGeneration", None, "LlavaOnevision.* pixels .*embedding_fields"),
        ("E-PD", "BrandNewForConditionalGeneration", None, "no test shows"),
    ],
)
def test_encoder_free_is_refused_with_the_flag_the_reason_and_what_to_do(
    layout: str, architecture: str, vllm: tuple[int, int] | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--encoder-free: .*{said}") as refused:
        check_encoder_free(architecture, parse(layout), vllm)
    assert refused.value.param == "encoder_free"


@pytest.mark.parametrize("layout", ["E-P-D", "(E-P)-D", "E-PD", "(E-PD)", "2E-3P-D"])
@pytest.mark.parametrize("architecture", [*ENCODER_FREE, ""])
def test_encoder_free_is_for_families_that_tests_show(layout: str, architecture: str) -> None:
    for vllm in ((0, 32), (0, 33), None):
        check_encoder_free(architecture, parse(layout), vllm)
    assert not set(ENCODER_FREE) & set(NOT_ENCODER_FREE) and {*ENCODER_FREE} <= set(TESTED)


@pytest.mark.skipif(not METADATA_TRAVELS, reason="this vLLM takes no item as metadata alone")
def test_vllm_declares_what_sizes_an_item_of_those_alone() -> None:
    from epd_serve.engine.model_probe import sized_by_metadata

    assert all(map(sized_by_metadata, ENCODER_FREE))
    assert not any(map(sized_by_metadata, NOT_ENCODER_FREE))


@pytest.mark.parametrize("architecture", TESTED)
def test_tested_architectures_pass_without_a_word(architecture: str) -> None:
    assert check_encoders_fit(architecture, parse("(E-P)-D")) is None
    assert architecture not in REFUSED


def test_a_modality_without_a_decoder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert set(undecodable(("image", "video", "audio"))) == {"video", "audio"}
    assert "soundfile" in undecodable(("audio",))["audio"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in ("cv2", "av") else None)
    assert undecodable(("image", "video", "audio")) == {}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="reads vLLM's source")
def test_the_table_is_what_vllms_source_says() -> None:
    from epd_serve.engine.model_probe import architectures, probe

    assert probe() == {name: why for name, why in REFUSED.items() if name in architectures()}
