"""What devices are, asked of stand-ins of the vendors' tools that print what the real ones print."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from npu_ops import properties, vendor_tool
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import DeviceUser, parse_gpu_users, parse_gpus, read_properties
from tests.npu_ops.smi_outputs import A2_24_1, A2_MAPPING, A3_25_2, A3_BOARD, A3_MAPPING, PLATFORM_910B4

MIB, GIB = 1 << 20, 1 << 30
A2 = DeviceInventory("npu", (1, 0), ("Ascend 910B1", "Ascend 910B1"))
GPUS = DeviceInventory("cuda", (0, 1), ("NVIDIA H200", "NVIDIA H200"))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH and a CANN of its own."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    return tmp_path


def npu_smi(folder: Path, mapping: str, usage: str, board: str = "") -> None:
    _script(
        folder / "npu-smi",
        f'case "$*" in\n"info -m") /bin/cat <<"END"\n{mapping}END\n;;\n'
        f'"info") /bin/cat <<"END"\n{usage}END\n;;\n'
        f'"info -t board -i 0 -c 0") /bin/cat <<"END"\n{board}END\n;;\n*) exit 1;;\nesac\n',
    )


def nvidia_smi(folder: Path, gpus: str, apps: str | None) -> None:
    answer = "exit 6" if apps is None else f'/bin/cat <<"END"\n{apps}END'
    _script(
        folder / "nvidia-smi",
        f'case "$1" in\n--query-gpu*) /bin/cat <<"END"\n{gpus}END\n;;\n--query-compute-apps*) {answer}\n;;\nesac\n',
    )


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)


def platform_file(machine: Path, soc: str) -> None:
    folder = machine / "cann" / "aarch64-linux" / "data" / "platform_config"
    folder.mkdir(parents=True)
    (folder / f"{soc}.ini").write_text(PLATFORM_910B4)


def test_an_a2_board_tells_memory_users_soc_and_cores(machine: Path) -> None:
    npu_smi(machine, A2_MAPPING, A2_24_1)
    platform_file(machine, "Ascend910B1")
    busy, idle = read_properties(A2)
    assert (busy.index, busy.name, busy.soc, busy.cores) == (1, "910B1", "Ascend910B1", {"cube": 20, "vector": 40})
    assert (busy.total_bytes, busy.free_bytes) == (64 * GIB, (65536 - 64266) * MIB)
    assert busy.users == (DeviceUser(3180736, "rayMyLLM.__in", 60889 * MIB),)
    assert (idle.index, idle.users, idle.note) == (0, (), "")


def test_an_a3_board_is_asked_once_for_its_soc(machine: Path) -> None:
    npu_smi(machine, A3_MAPPING, A3_25_2, A3_BOARD)
    platform_file(machine, "Ascend910_9392")
    found = read_properties(DeviceInventory("npu", (0, 1, 2, 3), ("Ascend910",) * 4))
    assert {one.soc for one in found} == {"Ascend910_9392"}
    assert [one.free_bytes for one in found] == [(65536 - used) * MIB for used in (3131, 2886, 3125, 3193)]
    assert [len(one.users) for one in found] == [0, 0, 0, 1]


def test_cores_are_unknown_without_cann_s_platform_file(machine: Path) -> None:
    npu_smi(machine, A2_MAPPING, A2_24_1)
    found = read_properties(A2)[0]
    assert found.cores == {} and found.total_bytes == 64 * GIB
    assert found.note == f"CANN has no platform file of Ascend910B1 below {machine}/cann"


def test_what_a_tool_does_not_tell_stays_unknown_with_the_reason(machine: Path) -> None:
    def only() -> tuple[int | None, str]:
        found = read_properties(A2)
        assert [one.index for one in found] == [1, 0]
        return found[0].total_bytes, found[0].note

    assert only() == (None, "npu-smi is not on PATH")
    npu_smi(machine, "nothing known\n", A2_24_1)
    assert only() == (None, "npu-smi info -m shows no device 1")
    npu_smi(machine, A2_MAPPING, "a layout of another year\n")
    assert only() == (None, "npu-smi info shows no memory of device 1")


def test_a_hung_tool_costs_its_timeout_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_tool, "TOOL_TIMEOUT_S", 0.2)
    _script(machine / "npu-smi", 'echo "$*" >> "$0.asked"\nexec /bin/sleep 60\n')
    assert {one.note for one in read_properties(A2)} == {"npu-smi did not answer within 0.2 s"}
    assert (machine / "npu-smi.asked").read_text() == "info -m\n"


def test_gpus_tell_memory_and_users(machine: Path) -> None:
    nvidia_smi(
        machine,
        "0, GPU-aa, NVIDIA H200, 143771, 143000\n1, GPU-bb, NVIDIA H200, 143771, 2048\n",
        "GPU-bb, 4242, /usr/bin/python3, 141000\nGPU-bb, 4243, [Not Found], [N/A]\n",
    )
    idle, busy = read_properties(GPUS)
    assert (idle.name, idle.cores, idle.total_bytes, idle.users) == ("NVIDIA H200", {}, 143771 * MIB, ())
    assert busy.free_bytes == 2 * GIB
    assert busy.users == (DeviceUser(4242, "/usr/bin/python3", 141000 * MIB), DeviceUser(4243, "[Not Found]", None))


def test_a_gpu_whose_users_or_memory_are_not_told_says_so(machine: Path) -> None:
    nvidia_smi(machine, "0, GPU-aa, NVIDIA H200, 143771, 143000\n1, GPU-bb, NVIDIA GB10, [N/A], [N/A]\n", None)
    first, second = read_properties(GPUS)
    assert first.total_bytes == 143771 * MIB and first.note == "nvidia-smi failed: exit code 6"
    assert second.total_bytes is None and second.note == "nvidia-smi does not tell this device's memory"
    nvidia_smi(machine, "0, GPU-aa, NVIDIA H200, 143771, 143000\nUnable to determine the device handle\n", "")
    assert read_properties(GPUS)[1].note == "nvidia-smi shows no device 1"


def test_commas_in_names_are_part_of_the_name() -> None:
    assert parse_gpus("0, GPU-aa, Odd, Inc, 10, 9")[0].name == "Odd, Inc"
    assert parse_gpu_users("GPU-aa, 7, /opt/a, b, 5") == {"GPU-aa": [DeviceUser(7, "/opt/a, b", 5 * MIB)]}


def test_the_host_stands_for_all_virtual_devices() -> None:
    (host,) = read_properties(DeviceInventory("cpu"))
    assert host.index == 0 and host.name and not host.users and not host.note
    assert host.cores == {"cpu": len(os.sched_getaffinity(0))}
    assert host.total_bytes is not None and host.free_bytes is not None and 0 < host.free_bytes < host.total_bytes


def test_a_container_has_no_more_memory_than_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "container_memory", lambda: (64 * MIB, 3 * MIB))
    (host,) = read_properties(DeviceInventory("cpu"))
    assert (host.total_bytes, host.free_bytes) == (64 * MIB, 3 * MIB)
