"""The host and its cgroup: what is read, and what is made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.doctor.check import Level
from deploy.doctor.facts import Facts
from deploy.doctor.gather import cpu_flags, quota_cores, read_machine
from npu_ops import properties
from tests.deploy.doctor.machines import CPU, GIB, NPU, found, serving, troubles


def with_machine(base: Facts = CPU, **changed: Any) -> Facts:
    return replace(base, machine=replace(base.machine, **changed))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
    ids=["v2", "v1", "v2 without", "v1 without", "no cgroup"],
)
def test_a_cgroups_cores_are_read_in_both_versions(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    assert quota_cores(write(tmp_path, files)) == cores


def test_the_memory_of_a_container_is_its_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "container_memory", lambda: (1 << 20, 1 << 19))
    here = read_machine()
    assert (here.memory_limit_bytes, here.memory_bytes) == (1 << 20, 1 << 19)
    monkeypatch.setattr(properties, "container_memory", lambda: (1 << 62, 1 << 62))  # v1's way to say none
    assert read_machine().memory_limit_bytes is None


def test_a_machine_without_shared_memory_is_told(tmp_path: Path) -> None:
    assert read_machine(tmp_path / "no-shm").shm_free_mib is None


def test_the_instructions_of_both_architectures_are_read() -> None:
    assert cpu_flags("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n") == {"fpu", "avx2", "avx512f"}
    assert cpu_flags("Features\t: fp asimd bf16\n") == {"fp", "asimd", "bf16"}
    assert cpu_flags("") == frozenset()


@pytest.mark.parametrize(
    ("changed", "check", "level", "words"),
    [
        ({"quota_cores": 1.5}, "cpu cores", Level.WARNING, "grants 1.5 at a time"),
        ({"cpu_flags": frozenset({"sse4_2"})}, "cpu instructions", Level.ERROR, "no AVX2"),
        ({"cpu_flags": frozenset({"avx2"})}, "cpu instructions", Level.WARNING, "no AVX-512"),
        ({"cpu_flags": frozenset()}, "cpu instructions", Level.WARNING, "AVX2"),
        ({"open_files": 256}, "open files", Level.WARNING, "256 per process"),
        ({"memory_bytes": GIB}, "memory", Level.WARNING, "1.0 GiB free"),
        ({"memory_limit_bytes": 4 * GIB, "memory_bytes": GIB}, "memory", Level.WARNING, "of the cgroup's 4.0"),
        ({"shm_free_mib": 63}, "/dev/shm", Level.WARNING, "63 MiB free, 320 MiB wanted"),
        ({"shm_free_mib": None}, "/dev/shm", Level.ERROR, "not there"),
        ({"cores": 1}, "cpu cores", Level.WARNING, "1 cores"),
    ],
)
def test_what_is_short_for_the_layout_is_said(changed: dict[str, Any], check: str, level: Level, words: str) -> None:
    one = found(with_machine(serving(CPU, "(E-P)-D"), **changed), check)
    assert one.level is level and words in one.seen and one.fix


def test_locked_memory_matters_where_devices_and_networks_need_it() -> None:
    assert troubles(with_machine(NPU, locked_bytes=64 << 10)) == {"locked memory": "warning"}
    assert troubles(with_machine(CPU, locked_bytes=64 << 10)) == {}


def test_the_machine_that_this_runs_on_can_be_read() -> None:
    here = read_machine()
    assert here.cores >= 1 and here.memory_bytes and here.open_files != 0
