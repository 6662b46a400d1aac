"""Names of shared memory go as soon as everybody has mapped it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

from deploy.rank_memory import unlink_rank_memory


def test_only_the_names_of_rank_memory_that_these_processes_map_are_removed(tmp_path: Path) -> None:
    ours, others, plain = tmp_path / "vllm_dist_1-tp", tmp_path / "vllm_dist_2-tp", tmp_path / "psm_3"
    for path in (ours, others, plain):
        path.write_bytes(bytes(4096))
    with ours.open("r+b") as one, plain.open("r+b") as two:
        memory, other = mmap.mmap(one.fileno(), 4096), mmap.mmap(two.fileno(), 4096)
        assert unlink_rank_memory([os.getpid()], f"{tmp_path}/vllm_dist_") == {str(ours)}
        memory[0] = 7  # the memory itself stays
        assert unlink_rank_memory([os.getpid()], f"{tmp_path}/vllm_dist_") == set()
        memory.close()
        other.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["psm_3", "vllm_dist_2-tp"]


def test_a_process_that_has_ended_maps_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert unlink_rank_memory([ended.pid]) == set()
