"""Discovery against stand-ins of npu-smi and nvidia-smi that print what the real ones print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from npu_ops import discovery, vendor_tool
from npu_ops.discovery import DiscoveryError, discover
from tests.npu_ops.smi_outputs import A2_MAPPING, A3_MAPPING

TWO_GPUS = """\
0, GPU-8f3a1c52-0000-1111-2222-333344445555, NVIDIA A100
1, GPU-8f3a1c99-0000-1111-2222-333344445555, NVIDIA A100
"""


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of its own and no device files, whatever this machine has."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(discovery, "_numbered_files", lambda folder, prefix, name: {})
    return tmp_path


def tool(folder: Path, name: str, output: str = "", exit_code: int = 0, before: str = "") -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{before}\n/bin/cat <<'END'\n{output}END\nexit {exit_code}\n")
    path.chmod(0o755)


def test_npus_are_the_rows_with_a_logic_id(bare_machine: Path) -> None:
    tool(bare_machine, "npu-smi", A2_MAPPING)
    found = discover("npu")
    assert (found.kind, found.ids, found.names) == ("npu", (0, 1), ("Ascend 910B1", "Ascend 910B1"))


def test_each_chip_of_an_a3_board_is_a_device(bare_machine: Path) -> None:
    tool(bare_machine, "npu-smi", A3_MAPPING)
    assert discover("npu").ids == (0, 1, 2, 3)


def test_gpus_come_with_their_names(bare_machine: Path) -> None:
    tool(bare_machine, "nvidia-smi", TWO_GPUS)
    found = discover("cuda")
    assert (found.kind, found.ids, found.names) == ("cuda", (0, 1), ("NVIDIA A100", "NVIDIA A100"))


def test_auto_prefers_npu_then_cuda_then_cpu(bare_machine: Path) -> None:
    assert discover("auto").kind == "cpu"
    tool(bare_machine, "nvidia-smi", TWO_GPUS)
    assert discover("auto").kind == "cuda"
    tool(bare_machine, "npu-smi", A2_MAPPING)
    assert discover("auto").kind == "npu"


def test_auto_passes_over_a_tool_without_devices(bare_machine: Path) -> None:
    tool(bare_machine, "npu-smi", "dcmi module initialize failed. ret is -8005\n", exit_code=1)
    tool(bare_machine, "nvidia-smi", "No devices were found\n")
    assert discover("auto").kind == "cpu"


def test_visible_devices_limit_and_order_what_is_found(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(bare_machine, "npu-smi", A3_MAPPING)
    tool(bare_machine, "nvidia-smi", TWO_GPUS)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f3a1c99")
    assert discover("npu").ids == (3, 1)
    assert discover("cuda").ids == (1,)


@pytest.mark.parametrize("asked", ["7", "0,7", "GPU-8f3a1c", "MIG-1234", "0,0"])
def test_a_visible_device_that_is_not_there_is_refused(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    tool(bare_machine, "nvidia-smi", TWO_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    with pytest.raises(DiscoveryError, match="CUDA_VISIBLE_DEVICES"):
        discover("cuda")


def test_nothing_visible_is_an_empty_inventory_with_the_reason(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(bare_machine, "nvidia-smi", TWO_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert discover("cuda").ids == ()
    assert "CUDA_VISIBLE_DEVICES is empty" in discover("cuda").note


def test_a_missing_or_failing_tool_is_named(bare_machine: Path) -> None:
    assert discover("npu").note == "npu-smi is not on PATH"
    tool(bare_machine, "nvidia-smi", "couldn't communicate with the NVIDIA driver\n", exit_code=9)
    assert discover("cuda").note == "nvidia-smi failed: couldn't communicate with the NVIDIA driver"


def test_a_hung_tool_is_given_up(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_tool, "TOOL_TIMEOUT_S", 0.2)
    tool(bare_machine, "npu-smi", A2_MAPPING, before="/bin/sleep 5")
    assert discover("npu").note == "npu-smi did not answer within 0.2 s"


def test_device_files_stand_in_for_a_missing_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in ("davinci0", "davinci3", "davinci_manager"):
        (tmp_path / name).touch()
    assert discovery._numbered_files(str(tmp_path), "davinci", "Ascend NPU") == {0: "Ascend NPU", 3: "Ascend NPU"}


def test_cpu_has_as_many_virtual_devices_as_asked() -> None:
    assert discover("cpu").allot(3) == (0, 1, 2)


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown device kind 'tpu'"):
        discover("tpu")


def test_discovery_imports_no_framework() -> None:
    code = (
        "import sys, npu_ops.discovery, npu_ops.properties, npu_ops.core_sets\n"
        "import epd_serve.layout_parser, epd_serve.model_facts\n"
        "bad = {'torch', 'torch_npu', 'vllm', 'transformers', 'mooncake'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
