"""What memory the container that this process runs in may use (cgroup v2 or v1). /proc/meminfo shows the host's."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_LIMIT_USAGE = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_RECLAIMABLE = ({"active_file", "inactive_file"}, {"total_active_file", "total_inactive_file"})


def container_memory(root: Path = _ROOT) -> tuple[int, int] | None:
    """(limit, what of it is free) in bytes; None where nothing limits, or nothing can be read.

    Usage counts cached files, which the kernel drops when memory is needed; those are free.
    """
    for (limit_file, usage_file), names in zip(_LIMIT_USAGE, _RECLAIMABLE, strict=True):
        try:
            limit, usage = (root / limit_file).read_text(), int((root / usage_file).read_text())
            stat = (root / limit_file).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if not limit.strip().isdecimal():
            return None  # "max"
        rows = (line.split() for line in stat.splitlines())
        cached = sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in names)
        return int(limit), max(0, int(limit) - max(0, usage - cached))
    return None
