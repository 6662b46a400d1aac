"""Facts about the host, or the container's share of it: cores, memory, limits, shared memory. Reads files only."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import sys
from pathlib import Path

from deploy.doctor.ascend_files import read_text
from deploy.doctor.facts import MachineFacts
from npu_ops.properties import container_memory


def read_machine(root: Path = Path("/"), shm: Path = Path("/dev/shm")) -> MachineFacts:
    """Never raises: what cannot be read stays unknown. `root`: where /proc and /sys lie."""
    memory = _table(root / "proc/meminfo")
    limit, used = _memory_limit(root)
    return MachineFacts(
        python=sys.version_info[:3],
        architecture=platform.machine(),
        cpu_flags=cpu_flags(read_text(root / "proc/cpuinfo")),
        cores=len(os.sched_getaffinity(0)),
        quota_cores=_quota(root),
        memory_bytes=memory["MemAvailable"] << 10 if "MemAvailable" in memory else None,
        memory_limit_bytes=limit,
        memory_used_bytes=used,
        shm_free_mib=_free_mib(shm),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        hugepages=(memory.get("HugePages_Total", 0), memory.get("HugePages_Free", 0)),
        libibverbs=_loads("libibverbs.so.1"),
    )


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Of the first processor: x86 names them `flags`, Arm `Features`."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(found.group(1).split()) if found is not None else frozenset()


def _quota(root: Path) -> float | None:
    """Cores per second: cgroup v2 `cpu.max` (`200000 100000`, or `max`), else v1's pair of files."""
    words = read_text(root / "sys/fs/cgroup/cpu.max").split()
    if len(words) != 2:
        v1 = root / "sys/fs/cgroup/cpu"
        words = [read_text(v1 / "cpu.cfs_quota_us").strip(), read_text(v1 / "cpu.cfs_period_us").strip()]
    if not all(word.isdecimal() for word in words) or int(words[1]) == 0:  # max, -1, or not there
        return None
    return int(words[0]) / int(words[1])


def _memory_limit(root: Path) -> tuple[int | None, int | None]:
    """(limit, use without cached files) of the cgroup in bytes; a limit of more than the machine has is none."""
    limit, free = container_memory(root / "sys/fs/cgroup") or (None, None)
    total = _table(root / "proc/meminfo").get("MemTotal", 0) << 10
    if limit is None or free is None or (total and limit >= total):
        return None, None
    return limit, limit - free


def _free_mib(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize >> 20


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _table(path: Path) -> dict[str, int]:
    """`Name:   12 kB` as {Name: 12}."""
    return {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+)", read_text(path), re.MULTILINE)}
