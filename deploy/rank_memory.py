"""Shared memory through which the tensor-parallel ranks of a CPU stage reduce: vLLM makes it and never removes it.

All ranks have it mapped once their stage serves, and none opens it again, so its names can go from then on: the memory
itself goes with the processes, however they end. (vLLM's `cpu_communicator.py`; names are those of its file store.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

PREFIX = "/dev/shm/vllm_dist_"


def unlink_rank_memory(pids: Iterable[int], prefix: str = PREFIX) -> set[str]:
    """Remove the names of such memory that these processes have mapped; which ones."""
    names = {name for pid in pids for name in _mapped(pid) if name.startswith(prefix)}
    for name in names:
        Path(name).unlink(missing_ok=True)
    return names


def _mapped(pid: int) -> set[str]:
    """Files that a process has mapped and that still have their names (Linux /proc)."""
    with contextlib.suppress(OSError):  # it has ended, or is not ours to look into
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = [line.split(maxsplit=5) for line in lines]
        return {row[5] for row in fields if len(row) == 6 and not row[5].endswith(" (deleted)")}
    return set()
