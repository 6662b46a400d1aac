"""Memory of a process."""

from __future__ import annotations

import os

import pytest

from tests.soak.resident import Resident, parse_rollup, resident

ROLLUP = """\
55d5c0000000-7fff00000000 ---p 00000000 00:00 0                          [rollup]
Rss:              204800 kB
Pss:              100000 kB
Private_Clean:      1024 kB
Private_Dirty:     50176 kB
Swap:                  0 kB
"""


def test_a_rollup_is_read_in_mebibytes() -> None:
    assert parse_rollup(ROLLUP) == Resident(200.0, 50.0)


def test_memory_of_several_processes_adds_up() -> None:
    one, two = resident([os.getpid()]), resident([os.getpid(), os.getpid()])
    assert 0 < one.uss_mb <= one.rss_mb < two.rss_mb


def test_a_process_that_is_gone_is_an_error() -> None:
    with pytest.raises(OSError, match="No such"):
        resident([2**22 + 1])
