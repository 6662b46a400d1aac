"""The host and its cgroup: what is read, and what is made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.doctor.facts import Facts
from deploy.doctor.finding import Level
from deploy.doctor.machine import cpu_flags, read_machine
from tests.deploy.doctor.machines import CPU, GIB, NPU, found, serving, troubles


def with_machine(base: Facts = CPU, **changed: Any) -> Facts:
    return replace(base, machine=replace(base.machine, **changed))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = (
    "MemTotal:       65536000 kB\nMemAvailable:   32768000 kB\nHugePages_Total:       4\nHugePages_Free:        3\n"
)


def test_a_cgroups_limits_are_read_in_both_versions(tmp_path: Path) -> None:
    second = {
        "cpu.max": "150000 100000\n",
        "memory.max": "4294967296\n",
        "memory.current": "1073741829\n",
        "memory.stat": "anon 1073741824\nactive_file 2\ninactive_file 3\n",
    }
    v2 = read_machine(write(tmp_path / "v2", {f"sys/fs/cgroup/{name}": text for name, text in second.items()}))
    assert (v2.quota_cores, v2.memory_limit_bytes, v2.memory_used_bytes) == (1.5, 4 * GIB, GIB)
    first = {
        "cpu/cpu.cfs_quota_us": "400000\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "4294967296\n",
        "memory/memory.usage_in_bytes": "7\n",
        "memory/memory.stat": "rss 7\n",
    }
    v1 = read_machine(write(tmp_path / "v1", {f"sys/fs/cgroup/{name}": text for name, text in first.items()}))
    assert (v1.quota_cores, v1.memory_limit_bytes, v1.memory_used_bytes) == (4.0, 4 * GIB, 7)


@pytest.mark.parametrize(
    "files",
    [
        {"cpu.max": "max 100000\n", "memory.max": "max\n"},
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        {"memory/memory.limit_in_bytes": "9223372036854771712\n"},  # v1's way to say none
        {},
    ],
)
def test_no_limit_is_none(tmp_path: Path, files: dict[str, str]) -> None:
    root = write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/meminfo": MEMINFO})
    found = read_machine(root, tmp_path / "no-shm")
    assert (found.quota_cores, found.memory_limit_bytes, found.shm_free_mib) == (None, None, None)
    assert (found.memory_bytes, found.hugepages) == (32768000 << 10, (4, 3))


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
        ({"memory_limit_bytes": 4 * GIB, "memory_used_bytes": 3 * GIB}, "memory", Level.WARNING, "of the cgroup's 4.0"),
        ({"memory_bytes": None}, "memory", Level.WARNING, "not known"),
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
