"""Which architectures may encode apart: the launcher's table, and the installed vLLM's source that it came from."""

from __future__ import annotations

import importlib.util

import pytest

from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.model_support import REFUSED, TESTED, check_encoders_fit, left_out, undecodable, why_not_apart


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
