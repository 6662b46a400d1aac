"""The traffic board: what one process announces another one sees, and nothing on it lasts."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epd_serve.engine.traffic import KINDS, LONGEST_S, Kind, TrafficBoard
from tests.waiting import PATIENCE_S

ANNOUNCER = """
import os, signal, sys, time
from epd_serve.engine.traffic import TrafficBoard
with TrafficBoard(sys.argv[1], announcer=1).announce("fetch", float(sys.argv[2])):
    print(time.monotonic(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[3] == "dies" else sys.stdin.read()
print("left", flush=True)
sys.stdin.read()
"""


def announcer(path: Path, for_s: float, fate: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ANNOUNCER, str(path), str(for_s), fate],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def is_quiet(board: TrafficBoard) -> bool:
    now = time.monotonic()
    return board.quiet_until(now) > now


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_is_wanted_while_an_announcement_lasts(tmp_path: Path, kind: Kind) -> None:
    board, link = TrafficBoard(str(tmp_path / "board")), TrafficBoard(str(tmp_path / "board"))
    assert not is_quiet(link)
    before = time.monotonic()
    with board.announce(kind, 2.0):
        assert before + 2.0 <= link.quiet_until(before) <= time.monotonic() + 2.0
    assert not is_quiet(link)


def test_the_last_of_several_announcements_counts(tmp_path: Path) -> None:
    board, began = TrafficBoard(str(tmp_path / "board")), time.monotonic()
    with board.announce("fetch", 0.1):
        first = board.quiet_until(began)
        with board.announce("fetch", 1.1):
            assert board.quiet_until(began) >= first + 1.0
        assert board.quiet_until(began) == first


def test_an_announcement_ends_when_what_it_is_for_fails(tmp_path: Path) -> None:
    board = TrafficBoard(str(tmp_path / "board"))
    with pytest.raises(OSError, match="gone"), board.announce("fetch", 2.0):
        raise OSError("gone")
    assert not is_quiet(board)


def test_announcements_of_different_processes_do_not_end_each_other(tmp_path: Path) -> None:
    scheduler, worker = (TrafficBoard(str(tmp_path / "board"), announcer) for announcer in (0, 1))
    began = time.monotonic()
    with scheduler.announce("fetch", 1.0):
        with worker.announce("fetch", 0.5):
            pass
        assert worker.quiet_until(began) >= began + 1.0


def test_another_process_is_seen_to_announce_and_to_end(tmp_path: Path) -> None:
    board = TrafficBoard(str(tmp_path / "board"))
    with announcer(tmp_path / "board", 4.0, "lives") as other:
        assert other.stdout is not None and other.stdin is not None
        announced = float(other.stdout.readline())
        assert announced < board.quiet_until(announced) <= announced + 4.0
        other.stdin.close()
        assert other.stdout.readline() == "left\n"
        assert board.quiet_until(announced) == 0.0


def test_an_announcer_that_is_killed_is_waited_for_no_longer_than_it_said(tmp_path: Path) -> None:
    board = TrafficBoard(str(tmp_path / "board"))
    with announcer(tmp_path / "board", 4.0, "dies") as other:
        assert other.stdout is not None
        announced = float(other.stdout.readline())
        other.wait(PATIENCE_S)
    until = board.quiet_until(announced)
    assert announced < until <= announced + 4.0
    assert board.quiet_until(until + 0.1) <= until + 0.1


def test_no_announcement_lasts_longer_than_the_board_allows(tmp_path: Path) -> None:
    board = TrafficBoard(str(tmp_path / "board"))
    with board.announce("collective", 3600.0):
        assert board.quiet_until(time.monotonic()) <= time.monotonic() + LONGEST_S


@pytest.mark.parametrize("left", [1e12, float("nan"), float("inf"), -1.0])
def test_what_is_no_time_on_the_board_is_not_believed(tmp_path: Path, left: float) -> None:
    path = tmp_path / "board"
    board = TrafficBoard(str(path))
    with path.open("r+b") as file:
        file.write(struct.pack("d", left))
    assert not is_quiet(board)


def test_without_a_board_nobody_waits() -> None:
    board = TrafficBoard("")
    with board.announce("fetch", 1.0):
        assert not is_quiet(board)
