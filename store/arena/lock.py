"""The lock of an arena: between threads, between processes, released by the kernel when its holder dies.

flock(2) belongs to an open file description, so every arena object opens its own and a forked child opens it anew.
A holder that died in the middle leaves its pid in the header; the next one repairs the index before it goes on.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

from store.arena.layout import H_HOLDER
from store.arena.owners import open_anew
from store.errors import StoreError

_FIRST_NAP_S = 20e-6
_LONGEST_NAP_S = 1e-3


class ArenaLock:
    """Context manager; not re-entrant. Only index changes happen inside, never copies of features."""

    def __init__(self, fd: int, words: memoryview, repair: Callable[[], None], timeout_s: float) -> None:
        """Opens the file of `fd` anew. `repair` is called, locked, when the last holder did not finish."""
        self._fd = open_anew(fd)
        self._words = words
        self._repair = repair
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._threads = threading.Lock()

    def __enter__(self) -> None:
        """Raises StoreError when the lock is not had in time or is closed."""
        if not (self._threads.acquire(False) or self._threads.acquire(timeout=self._timeout_s)):
            raise StoreError(f"arena: another thread held the lock for {self._timeout_s} s")
        try:
            if self._fd < 0:
                raise StoreError("arena: closed")
            self._lock_file()
            try:
                if self._words[H_HOLDER]:
                    self._repair()
                self._words[H_HOLDER] = self._pid
            except BaseException:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                raise
        except BaseException:
            self._threads.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd < 0:  # closed by the body
            self._threads.release()
            return
        # Our own refusals leave a whole index; anything else (a Ctrl-C) may have cut a change in two.
        if kind is None or issubclass(kind, StoreError):
            self._words[H_HOLDER] = 0
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            deadline = time.monotonic() + self._timeout_s
        nap_s = _FIRST_NAP_S
        while True:
            time.sleep(nap_s)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = self._words[H_HOLDER]
                    raise StoreError(f"arena: process {holder} held the lock for {self._timeout_s} s") from None
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def reopen_after_fork(self) -> None:
        """In a forked child: stop sharing the parent's file description (and its lock)."""
        inherited = self._fd
        self._threads = threading.Lock()
        self._pid = os.getpid()
        if inherited >= 0:
            self._fd = open_anew(inherited)
            os.close(inherited)

    def close(self) -> None:
        """Called while locked: later attempts raise StoreError. Lets go of the mapping."""
        self._words[H_HOLDER] = 0
        os.close(self._fd)  # releases the flock
        self._fd = -1
        self._words = memoryview(b"")
        self._repair = _nothing


def _nothing() -> None: ...
