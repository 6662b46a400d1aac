"""What the proxy is told that the model takes: its towers, less what the layout or the environment cannot serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.options import versions
from deploy.options.config import DeployConfig
from deploy.plan import proxy_settings
from deploy.plan.blueprint import Blueprint, draw
from epd_serve.errors import ConfigError

NEMOTRON = {"architectures": ["NemotronH_Nano_VL_V2"], "vision_config": {}}
AUDIO = {"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {}}
VIDEO_ON = ('all:--limit-mm-per-prompt \'{"image": 1, "video": 1}\'',)


def taken(folder: Path, config: dict[str, object], layout: str) -> frozenset[str] | None:
    (folder / "config.json").write_text(json.dumps(config))
    return proxy_settings._modalities(
        draw(DeployConfig(model=str(folder), layout=layout, device="cpu", stage_args=VIDEO_ON))
    )


def test_a_modality_that_cannot_be_encoded_apart_is_not_taken_under_encoders(tmp_path: Path) -> None:
    assert taken(tmp_path, NEMOTRON, "(E-P)-D") == {"image"}
    assert taken(tmp_path, NEMOTRON, "EP-D") == {"image", "video"}


def test_a_modality_that_nothing_here_decodes_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_settings, "undecodable", lambda modalities: {"audio": "no decoder"})
    assert taken(tmp_path, AUDIO, "TP1") == set()
    monkeypatch.setattr(proxy_settings, "undecodable", lambda modalities: {})
    assert taken(tmp_path, AUDIO, "TP1") == {"audio"}


QWEN = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}, "video_token_id": 1}


def encoder_free(folder: Path, layout: str = "E-P-D", *stage_args: str, **more: Any) -> Blueprint:
    (folder / "config.json").write_text(json.dumps(QWEN))
    return draw(
        DeployConfig(model=str(folder), layout=layout, device="cpu", stage_args=stage_args, encoder_free=True, **more)
    )


@pytest.fixture
def on_032(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda names: {"vllm": "0.32.0"})


@pytest.mark.usefixtures("on_032")
@pytest.mark.parametrize("layout", ["E-P-D", "E-PD"])
def test_an_encoder_free_deployment_takes_what_its_encoders_take(tmp_path: Path, layout: str) -> None:
    blueprint = encoder_free(tmp_path, layout)
    settings = proxy_settings.build_proxy_settings(blueprint)
    assert settings.modalities == {"image"} and settings.send_pixels == "never" and not settings.stages_encode
    with_clips = encoder_free(tmp_path, layout, 'E:--limit-mm-per-prompt \'{"image": 1, "video": 1}\'')
    assert proxy_settings._modalities(with_clips) == {"image", "video"}
    without = draw(DeployConfig(model=str(tmp_path), layout=layout, device="cpu"))
    assert proxy_settings.model_identity(blueprint) == proxy_settings.model_identity(without), "features are the same"


@pytest.mark.usefixtures("on_032")
def test_the_encoder_alone_is_started_with_one(tmp_path: Path) -> None:
    blueprint = encoder_free(tmp_path, "E-P-D", "P:--max-num-seqs 8")
    words = {plan.id: blueprint.stage_args.of(plan) for plan in blueprint.plans}
    assert words == {
        "E0": (),
        "P0": ("--language-model-only", "--max-num-seqs", "8"),
        "D0": ("--language-model-only",),
    }


@pytest.mark.usefixtures("on_032")
@pytest.mark.parametrize(("layout", "said"), [("EP-D", "EP of EP-D"), ("TP1", "EPD"), ("P-D", "no E")])
def test_a_layout_in_which_others_encode_is_refused(tmp_path: Path, layout: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--encoder-free: .*{said}"):
        encoder_free(tmp_path, layout)


def test_a_vllm_that_takes_no_metadata_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda names: {"vllm": "0.23.0"})
    with pytest.raises(ConfigError, match=r"--encoder-free: vLLM 0\.23 takes no item without its pixels"):
        encoder_free(tmp_path)


def test_pixels_for_everybody_and_no_encoder_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--encoder-free: .*send_pixels=always"):
        DeployConfig(encoder_free=True, send_pixels="always")
    with pytest.raises(ConfigError, match="serve them with --encoder-free"):
        DeployConfig(send_pixels="never")
    assert DeployConfig(encoder_free=True, send_pixels="never").encoder_free


@pytest.mark.usefixtures("on_032")
def test_the_parts_of_a_switchable_pair_are_both_without_an_encoder(tmp_path: Path) -> None:
    blueprint = encoder_free(tmp_path, switchable=True)
    words = {plan.id: blueprint.stage_args.of(plan) for plan in blueprint.plans if plan.both}
    assert words == {"P0": ("--language-model-only",), "D0": ("--language-model-only",)}
