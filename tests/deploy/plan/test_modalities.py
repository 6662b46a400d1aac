"""What the proxy is told that the model takes: its towers, less what the layout or the environment cannot serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.options.config import DeployConfig
from deploy.plan import proxy_settings
from deploy.plan.blueprint import draw

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
