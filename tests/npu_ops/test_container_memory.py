"""A container's memory limit, in files as both generations of cgroups lay them."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_ops.properties import container_memory

GIB = 1 << 30


def lay(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return root


def test_cached_files_are_free(tmp_path: Path) -> None:
    stat = f"anon {GIB}\nactive_file {2 * GIB}\ninactive_file {GIB}\n"
    lay(tmp_path, memory_dot_max=f"{8 * GIB}\n", memory_dot_current=f"{5 * GIB}\n", memory_dot_stat=stat)
    assert container_memory(tmp_path) == (8 * GIB, 6 * GIB)


def test_the_older_generation_counts_the_same(tmp_path: Path) -> None:
    files = {"limit_in_bytes": 32 * GIB, "usage_in_bytes": 30 * GIB}
    lay(tmp_path, **{f"memory__memory_dot_{name}": f"{value}\n" for name, value in files.items()})
    lay(tmp_path, memory__memory_dot_stat=f"active_file 7\ntotal_active_file {4 * GIB}\ntotal_inactive_file {GIB}\n")
    assert container_memory(tmp_path) == (32 * GIB, 7 * GIB)


@pytest.mark.parametrize("limit", ["max\n", ""])
def test_without_a_limit_there_is_none(tmp_path: Path, limit: str) -> None:
    lay(tmp_path, memory_dot_max=limit, memory_dot_current="1\n", memory_dot_stat="")
    assert container_memory(tmp_path) is None


def test_what_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    assert container_memory(tmp_path / "none") is None


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    lay(tmp_path, memory_dot_max="100\n", memory_dot_current="120\n", memory_dot_stat="")
    assert container_memory(tmp_path) == (100, 0)
