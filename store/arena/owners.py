"""Which processes have an arena open, and whether they still live: each keeps a kernel lock on its row of the file.

No pid is asked about, because a pid of another container means nothing here. The lock is one of an open file
description (fcntl(2), F_OFD_SETLK): it holds between PID namespaces, and the kernel lets go of it when the process
ends, however it ends. A forked child opens the file anew, as the parent's rows are not its own.
"""

from __future__ import annotations

import fcntl
import os
import struct

from store.arena.layout import HEADER_WORDS, O_TAKEN, OWNER_WORDS, WORD, Geometry
from store.errors import StoreError

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class OwnerTable:
    """The owner rows, as one open arena sees them. Callers hold the arena's lock."""

    def __init__(self, words: memoryview, geometry: Geometry, fd: int) -> None:
        """Opens the file of `fd` anew: rows are held by the new description.

        Raises:
            StoreError: the kernel or the file system has no such locks.
        """
        self._words = words
        self._rows = geometry.owners
        self._held: set[int] = set()
        self._fd = open_anew(fd)
        try:
            self._is_locked(0)
        except BaseException:
            os.close(self._fd)
            raise

    def claim(self) -> int | None:
        """A row for this process, or None when all are taken (some may be dead: reap, then ask again)."""
        for row in range(self._rows):
            at = HEADER_WORDS + row * OWNER_WORDS
            if self._words[at + O_TAKEN] == 0 and self._lock(row, fcntl.F_WRLCK):
                self._held.add(row)
                self._words[at + O_TAKEN] = 1  # locked first: a row that is taken and not locked has a dead owner
                return row
        return None

    def give_back(self, row: int) -> None:
        self._words[HEADER_WORDS + row * OWNER_WORDS + O_TAKEN] = 0
        if row in self._held:
            self._held.discard(row)
            self._lock(row, fcntl.F_UNLCK)

    def is_alive(self, row: int) -> bool:
        if row in self._held:
            return True  # the kernel names only locks of others
        return self._words[HEADER_WORDS + row * OWNER_WORDS + O_TAKEN] != 0 and self._is_locked(row)

    def dead(self) -> list[int]:
        """Rows whose process is gone."""
        taken = (row for row in range(self._rows) if self._words[HEADER_WORDS + row * OWNER_WORDS + O_TAKEN] != 0)
        return [row for row in taken if not self.is_alive(row)]

    def reopen_after_fork(self) -> None:
        """In a forked child: the rows stay the parent's, also when the child outlives it."""
        inherited, self._fd = self._fd, open_anew(self._fd)
        os.close(inherited)
        self._held.clear()

    def close(self) -> None:
        """Rows that were not given back stay ours until this process ends."""
        if self._held:
            _held_for_ever.add(self._fd)
        else:
            os.close(self._fd)
        self._words = memoryview(b"")

    def _is_locked(self, row: int) -> bool:
        """By another description than ours."""
        kind: int = _FLOCK.unpack(self._call(fcntl.F_OFD_GETLK, row, fcntl.F_WRLCK))[0]
        return kind != fcntl.F_UNLCK

    def _lock(self, row: int, kind: int) -> bool:
        try:
            self._call(fcntl.F_OFD_SETLK, row, kind)
        except BlockingIOError:
            return False
        return True

    def _call(self, command: int, row: int, kind: int) -> bytes:
        start = (HEADER_WORDS + row * OWNER_WORDS) * WORD
        try:
            return fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, start, OWNER_WORDS * WORD, 0))
        except BlockingIOError:
            raise
        except OSError as error:
            raise StoreError(f"arena: no locks of open file descriptions (fcntl) here: {error.strerror}") from error


def open_anew(fd: int) -> int:
    """A description of its own of the same file: a dup would share its locks."""
    # Through /proc, because the path may be unlinked by now.
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


_held_for_ever: set[int] = set()


def _drop_after_fork() -> None:
    while _held_for_ever:
        os.close(_held_for_ever.pop())


os.register_at_fork(after_in_child=_drop_after_fork)
