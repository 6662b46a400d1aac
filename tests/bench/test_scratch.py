"""Scratch folders go with their measurement, or with the next one."""

from __future__ import annotations

import os
import subprocess

from bench.served import remove_dead, scratch


def dead_pid() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def test_a_folder_is_there_as_long_as_its_context(tmp_path):
    with scratch(tmp_path) as made:
        (made / "file").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_measurement_left_goes_and_nothing_else(tmp_path):
    left, living, stranger = (f"epd-bench-{word}" for word in (f"{dead_pid()}-a", f"{os.getpid()}-b", "mine"))
    for name in (left, living, stranger):
        (tmp_path / name / "run").mkdir(parents=True)

    remove_dead(tmp_path, settled_s=3600.0)
    assert (tmp_path / left).exists(), "what it had started may not have ended yet"
    remove_dead(tmp_path, settled_s=0.0)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([living, stranger])
