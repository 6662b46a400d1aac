"""The file of an arena: made once at full size, mapped by every process, and the kernel's locks on its bytes.

The whole size is allocated at creation, so a machine without the memory refuses then, and no store dies of SIGBUS
later. `prefault` also fills the page tables: a first touch costs about as much as the copy that it interrupts.

Who may change the index, and which processes still live, is said by locks of open file descriptions (fcntl(2),
F_OFD_SETLK). They hold between processes and between PID namespaces, where a pid of another container means nothing,
and the kernel lets go of them when their process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from store.errors import StoreError
from store.feature import RECORD_BYTES

MAGIC = int.from_bytes(b"EPDarena", "little")
VERSION = 5
ALIGNMENT = PAGE = 4096  # every feature starts a page
WORD = 8

# Words of the header. The first five fix the layout. HOLDER: pid of whoever has the lock, for people.
H_MAGIC, H_VERSION, H_CAPACITY, H_SLOTS, H_OWNERS, H_HOLDER = range(6)
# Counts, in the order of `StoreStats`.
H_PUTS, H_HITS, H_MISSES, H_EVICTIONS, H_CORRUPT, H_RECLAIMED = range(8, 14)
H_SLOTS_USED, H_ROWS_USED = 14, 15  # slots and owner rows behind these were never used
HEADER_WORDS = 64

_INDEX_BYTE, _FIRST_ROW_BYTE = 0, 1  # of the file, as the kernel's locks count them
_FIRST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


Format: TypeAlias = Literal["B", "Q", "I"]
_COLUMNS: tuple[tuple[str, Format, int], ...] = (
    ("state", "B", 1),
    ("digest", "B", 16),
    ("offset", "Q", 1),
    ("nbytes", "Q", 1),
    ("owner", "Q", 1),
    ("tenant", "Q", 1),
    ("tick", "Q", 1),
    ("record", "B", RECORD_BYTES),
)
"""The format of a value, and how many a slot has."""


def align_up(value: int, alignment: int) -> int:
    """The least multiple of `alignment` (a power of two) that is not below `value`."""
    return (value + alignment - 1) & -alignment


@dataclass(frozen=True)
class Geometry:
    """The sizes that fix a file's layout: header | columns of the slot table | features.

    Attributes:
        capacity_bytes: room for features, whole pages.
        slots: most features at one time.
        owners: most processes at one time.
    """

    capacity_bytes: int
    slots: int
    owners: int

    def __post_init__(self) -> None:
        if self.capacity_bytes < ALIGNMENT or self.capacity_bytes % ALIGNMENT:
            raise StoreError(f"arena: capacity {self.capacity_bytes} is not a positive multiple of {ALIGNMENT}")

    def columns(self) -> dict[str, tuple[int, int, Format]]:
        """Of the slot table (`store.arena.table`): where each column starts, its bytes, its values' format."""
        found: dict[str, tuple[int, int, Format]] = {}
        start = HEADER_WORDS * WORD
        for name, form, count in (*_COLUMNS, ("leases", "I", self.owners)):
            nbytes = self.slots * count * struct.calcsize(form)
            found[name] = (start, nbytes, form)
            start = align_up(start + nbytes, 64)
        return found

    @property
    def data_byte(self) -> int:
        """Where the features start."""
        start, nbytes, _ = self.columns()["leases"]
        return align_up(start + nbytes, PAGE)

    @property
    def file_bytes(self) -> int:
        return self.data_byte + self.capacity_bytes


@contextmanager
def _named(what: str) -> Iterator[None]:
    """The kernel's refusals as StoreErrors."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error.strerror}") from error


def make_file(path: Path, geometry: Geometry) -> None:
    """Makes the file, whole or not at all, readable and writable by this user only. All slots are free in it.

    Raises:
        StoreError: it exists, or there is no room for it.
    """
    with _named(f"arena {path}"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with _named(f"arena {path}: {geometry.file_bytes} bytes"):
            os.posix_fallocate(fd, 0, geometry.file_bytes)
            os.pwrite(fd, struct.pack("=4Q", VERSION, *astuple(geometry)), WORD * H_VERSION)
            os.pwrite(fd, struct.pack("=Q", MAGIC), WORD * H_MAGIC)  # last: before it, nobody takes this for an arena
    except StoreError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def open_file(path: Path) -> tuple[int, Geometry]:
    """A new file description of an arena, and its layout.

    Raises:
        StoreError: no such file, or it is no arena of this version.
    """
    if not path.exists():
        raise StoreError(f"arena {path}: not there; containers that share it need one /dev/shm (--ipc)")
    with _named(f"arena {path}"):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return fd, _read_geometry(fd, path)
        except BaseException:
            os.close(fd)
            raise


def _read_geometry(fd: int, path: Path) -> Geometry:
    header, size = os.pread(fd, 5 * WORD, 0), os.fstat(fd).st_size
    magic, version, *sizes = struct.unpack("=5Q", header.ljust(5 * WORD, b"\0"))
    if magic != MAGIC:
        raise StoreError(f"{path} is not an arena")
    if version != VERSION:
        raise StoreError(f"{path} is an arena of version {version}; this is version {VERSION}")
    geometry = Geometry(*sizes)
    if size != geometry.file_bytes:
        raise StoreError(f"{path} is a damaged arena: {size} bytes, not {geometry.file_bytes}")
    return geometry


def map_file(fd: int, geometry: Geometry, *, prefault: bool) -> memoryview:
    """The whole file, shared and writable. It is unmapped when the last view of it is gone.

    Raises:
        StoreError: no address space.
    """
    with _named(f"arena: mapping {geometry.file_bytes} bytes"):
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0)
        return memoryview(mmap.mmap(fd, geometry.file_bytes, flags))


class ArenaLocks:
    """One process's locks on an arena: that of its index, between threads, too, and that of its owner row.

    The first is not re-entrant. Only index changes happen under it, never copies of features. A holder that dies in the
    middle leaves a whole index: every change is whole after each single store to it (`store.arena.table`).
    """

    def __init__(self, fd: int, header: memoryview) -> None:
        """Takes over `fd`, a description of its own. `header`: the file's, as words.

        Raises:
            StoreError: the kernel or the file system has no such locks.
        """
        self._fd = fd
        self._header = header
        self._threads = threading.Lock()
        self._pid = os.getpid()
        self.row: int | None = None  # ours, of the table's owners
        self._is_locked(_INDEX_BYTE)

    def acquire(self, timeout_s: float) -> None:
        """Lock the index. Raises StoreError when the lock is not had in time or is closed."""
        if not (self._threads.acquire(False) or (timeout_s and self._threads.acquire(timeout=timeout_s))):
            raise StoreError(f"arena: another thread held the lock for {timeout_s} s")
        try:
            if self._fd < 0:
                raise StoreError("arena: closed")
            nap_s, deadline = _FIRST_NAP_S, time.monotonic() + timeout_s
            while not self._set(_INDEX_BYTE, fcntl.F_WRLCK):
                if time.monotonic() > deadline:
                    raise StoreError(f"arena: process {self._header[H_HOLDER]} held the lock for {timeout_s} s")
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _LONGEST_NAP_S)
            self._header[H_HOLDER] = self._pid
        except BaseException:
            self._threads.release()
            raise

    def release(self) -> None:
        try:
            if self._fd >= 0:  # else closed meanwhile
                self._set(_INDEX_BYTE, fcntl.F_UNLCK)
        finally:
            self._threads.release()

    def claim_row(self, rows: int) -> int | None:
        """The first of so many owner rows whose owner does not live; it is ours until `close` or our end. What its
        former owner held is for the caller to take back. Locked."""
        self.row = next((row for row in range(rows) if self._set(_FIRST_ROW_BYTE + row, fcntl.F_WRLCK)), None)
        return self.row

    def is_alive(self, row: int) -> bool:
        """Whether the owner of a row lives. The kernel names only locks of other descriptions than ours."""
        return row == self.row or self._is_locked(_FIRST_ROW_BYTE + row)

    def reopen_after_fork(self) -> None:
        """In a forked child: stop sharing the parent's description, its locks and its row."""
        self._threads, self._pid, self.row = threading.Lock(), os.getpid(), None
        if self._fd >= 0:
            inherited, self._fd = self._fd, open_anew(self._fd)
            os.close(inherited)

    def close(self) -> None:
        """Locked, and unlocks; later attempts raise StoreError."""
        os.close(self._fd)
        self._fd = -1
        self._header = memoryview(b"")

    def _set(self, at: int, kind: int) -> bool:
        """False: another description has it."""
        try:
            self._call(fcntl.F_OFD_SETLK, at, kind)
        except BlockingIOError:
            return False
        return True

    def _is_locked(self, at: int) -> bool:
        """By another description than ours."""
        kind: int = _FLOCK.unpack(self._call(fcntl.F_OFD_GETLK, at, fcntl.F_WRLCK))[0]
        return kind != fcntl.F_UNLCK

    def _call(self, command: int, at: int, kind: int) -> bytes:
        try:
            return fcntl.fcntl(self._fd, command, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
        except BlockingIOError:
            raise
        except OSError as error:
            raise StoreError(f"arena: no locks of open file descriptions (fcntl) here: {error.strerror}") from error


def open_anew(fd: int) -> int:
    """A description of its own of the same file: a dup would share its locks."""
    # Through /proc, because the path may be unlinked by now.
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
