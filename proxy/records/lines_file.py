"""A file of lines, for what is noted of each request: access log and recording.

Lines leave in a thread of their own, so that a full disk or a terminal that nobody reads keeps no client waiting; what
then finds no room is dropped and counted. Several processes may write one file: a write is whole lines, at its end
(O_APPEND). A file that is renamed or removed, as by logrotate, is followed by a new one within a second.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from epd_serve.errors import ConfigError

logger = logging.getLogger(__name__)

STDERR = "-"
HELD_BYTES = 4 << 20
"""Of lines that wait for the writer."""

GATHER_S = 0.1
LOOK_S = 1.0
LAST_S = 2.0
"""How long the end waits for what is left."""


class LinesFile:
    """Args:
        path: of the file, or `-` for standard error.
        setting: which names it, for people.
        dropped: called with a number of lines that were lost.
        most_bytes: beyond half of that another file is begun, and this one is `PATH.1`, in place of the one before; 0
            for no bound.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: str, setting: str, dropped: Callable[[int], object], most_bytes: int = 0) -> None:
        self._path, self._setting, self._most_bytes = path, setting, most_bytes
        self._dropped = dropped
        self._lines: deque[bytes] = deque()
        self._taken_bytes = self._left_bytes = 0  # each written by one thread
        self._wanted = threading.Event()
        self._ending = False
        self._looked_at = time.monotonic()
        self._fd = self._open()
        self._thread = threading.Thread(target=self._run, name=setting, daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Of any thread's, but of one alone: soon, without its end."""
        if self._taken_bytes - self._left_bytes + len(line) + 1 > HELD_BYTES:
            self._dropped(1)
            return
        self._taken_bytes += len(line) + 1
        self._lines.append(line + b"\n")
        if not self._wanted.is_set():
            self._wanted.set()

    def close(self) -> None:
        """What has ended is written, unless that takes too long."""
        self._ending = True
        self._wanted.set()
        self._thread.join(LAST_S)
        if not self._thread.is_alive() and self._path != STDERR:
            os.close(self._fd)

    def _run(self) -> None:
        torn = b""
        while True:
            self._wanted.wait()
            if not self._ending:
                time.sleep(GATHER_S)  # a system call for many
            self._wanted.clear()
            ending = self._ending
            several = [self._lines.popleft() for _ in range(len(self._lines))]
            try:
                self._follow()
                _write_all(self._fd, torn + b"".join(several))
                torn = b""
            except OSError as error:
                torn = b"\n"  # half a line may be there: it is not to take the next one along
                self._dropped(len(several))
                logger.warning("%d lines of %s are lost: %s", len(several), self._setting, error.strerror)
                time.sleep(LOOK_S)
            self._left_bytes += sum(map(len, several))
            if ending:
                return

    def _follow(self) -> None:
        """Where somebody has taken the file away, go on in another one."""
        now = time.monotonic()
        if self._path == STDERR or now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        if self._most_bytes and os.fstat(self._fd).st_size > self._most_bytes / 2:
            self._turn_over()
        here = os.fstat(self._fd)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
            os.close(self._fd)
            self._fd = fd

    def _turn_over(self) -> None:
        """Only if it is the file still: another process may have done it."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            if os.path.exists(self._path) and os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                os.replace(self._path, f"{self._path}.1")
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _open(self) -> int:
        if self._path == STDERR:
            return 2
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
            if os.path.isfile(self._path) and _ends_torn(self._path):
                os.write(fd, b"\n")
            return fd
        except OSError as error:
            raise ConfigError(f"{self._setting} {self._path}: {error.strerror}", param=self._setting) from error


def _ends_torn(path: str) -> bool:
    """Whether the last line is half of one, of a writer that was killed."""
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
