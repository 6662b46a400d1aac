"""What a profile says of the machine that it was made on."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import deploy.memory.preview as previews
from deploy.planner.about import about, driver_versions
from epd_serve.demo.presets import builtin_model_dir
from npu_ops.discovery import DeviceInventory, discover
from npu_ops.properties import DeviceProperties
from tests.checkpoints import qwen25_vl_7b


def test_the_driver_is_told_where_its_tool_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_versions("cpu") == driver_versions("cuda") == {}
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n[ \"$*\" = '--query-gpu=driver_version --format=csv,noheader' ] && echo 570.86.15\n")
    tool.chmod(0o755)
    assert driver_versions("cuda") == {"driver": "570.86.15"}


def test_cann_is_told_of_an_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.cfg").write_text("toolkit_running_version=[7.6.0.1.220:8.0.0]\n")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert driver_versions("npu")["cann"] == "8.0.0"


def cards(monkeypatch: pytest.MonkeyPatch, count: int, gib: int) -> DeviceInventory:
    """GPUs of this machine."""
    found = DeviceInventory("cuda", tuple(range(count)), ("H200",) * count)
    sizes = [DeviceProperties(one, "H200", total_bytes=gib << 30, free_bytes=gib << 30) for one in found.ids]
    monkeypatch.setattr(previews, "_devices", lambda layout, kind, device_gib: (found, sizes))
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_what_the_encoder_takes_is_told_in_tokens_of_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """Its weights, and what vLLM keeps for its pass over a clip beyond that of the language model over a step."""
    model = str(qwen25_vl_7b(tmp_path / "Qwen2.5-VL-7B"))
    inventory = cards(monkeypatch, 8, 80)
    found, why = about("m", model, inventory, 8, (tp,), (), multimodal=True, interference=None)
    assert not why
    tower, token = found.weight_bytes["E"][tp] * tp, found.stages[1].kv_bytes_per_token
    assert found.encoder_free_kv_tokens[tp] * token > 2 * tower
    free = replace(found, stages={tp: found.stages[1]}).without_encoder()
    language = 15_230_566_400  # bytes, of the checkpoint less its tower
    assert free.weight_bytes["PD"][tp] == free.weight_bytes["P"][tp] == pytest.approx(language / tp, rel=1e-3)


def test_a_family_that_cannot_do_without_the_encoder_says_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(qwen25_vl_7b(tmp_path / "m", architectures=["Glm4vForConditionalGeneration"]))
    found, why = about("m", model, cards(monkeypatch, 4, 80), 4, (1,), (), multimodal=True, interference=None)
    assert not why and found.weight_bytes["E"] and found.encoder_free_kv_tokens == {}


def test_on_cpu_a_stage_is_told_its_kv_whatever_it_loads() -> None:
    found, _ = about("demo", str(builtin_model_dir()), discover("cpu"), 2, (1,), (), multimodal=True, interference=None)
    assert found.encoder_free_kv_tokens == {1: 0}
