"""Logs of processes that write for ever are bounded, and whoever reads them notices nothing."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli.end import _Log
from deploy.host.logs import PAGE_BYTES, bound_log, read_log

KEPT_BYTES = 64 << 10
WRITER = """
import sys
for number in range(200_000):
    print("line", number, flush=number % 500 == 0)
    if number % 20_000 == 0:
        sys.stdin.readline()
"""


def taken_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_whoever_follows_a_bounded_log_sees_every_line_once(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "P0.log"
    followed = _Log("P0", lambda offset: read_log(path, offset), prefixed=False)
    with path.open("ab") as log:
        writer = subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=log)
    assert writer.stdin is not None
    while writer.poll() is None:
        followed.show()
        bound_log(path, KEPT_BYTES)
        try:
            writer.stdin.write(b"\n")
            writer.stdin.flush()
        except BrokenPipeError:  # it has ended
            writer.wait()
    followed.show()
    assert capsysbinary.readouterr().out == b"".join(b"line %d\n" % number for number in range(200_000))
    bound_log(path, KEPT_BYTES)
    assert KEPT_BYTES <= taken_bytes(path) <= 2 * KEPT_BYTES < path.stat().st_size / 10


def test_what_is_left_of_a_log_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "P0.log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(100_000)))
    bound_log(path, KEPT_BYTES)
    data, end = read_log(path, 0, -1)
    lines = data.splitlines()
    assert end == path.stat().st_size and KEPT_BYTES - 20 < len(data) < KEPT_BYTES + 2 * PAGE_BYTES
    assert lines == [b"line %d" % number for number in range(100_000 - len(lines), 100_000)]
    assert read_log(path, end) == (b"", end)


@pytest.mark.parametrize("size_bytes", [0, 100, 2 * KEPT_BYTES])
def test_a_log_that_is_small_enough_stays_whole(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "P0.log"
    path.write_bytes(b"x" * size_bytes)
    bound_log(path, KEPT_BYTES)
    assert read_log(path, 0, -1) == (b"x" * size_bytes, size_bytes)


class Fails:
    """In place of the system's library."""

    def __init__(self, why: int) -> None:
        self.why = why

    def fallocate(self, *_: object) -> int:
        ctypes.set_errno(self.why)
        return -1


def test_a_log_of_which_no_room_can_be_given_back_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.host.logs._libc", Fails(errno.EINTR))
    path = tmp_path / "P0.log"
    path.write_bytes(b"x" * (3 * KEPT_BYTES))
    with pytest.raises(InterruptedError, match="P0"):
        bound_log(path, KEPT_BYTES)
    assert path.stat().st_size == 3 * KEPT_BYTES


@pytest.mark.parametrize("why", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_holes_a_log_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: int) -> None:
    monkeypatch.setattr("deploy.host.logs._libc", Fails(why))
    path = tmp_path / "P0.log"
    with path.open("ab") as log:
        log.write(b"x" * (3 * KEPT_BYTES))
        log.flush()
        bound_log(path, KEPT_BYTES)
        log.write(b"new\n")
    assert read_log(path, 3 * KEPT_BYTES) == (b"new\n", 4)
