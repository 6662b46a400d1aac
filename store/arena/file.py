"""The file of an arena: made once at full size, mapped by every process. Knows sizes, not features.

The whole size is allocated at creation, so a machine without the memory refuses then, and no store dies of SIGBUS
later. `prefault` also fills the page tables: a first touch costs about as much as the copy that it interrupts.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from store.arena.layout import (
    H_ALIGNMENT,
    H_CAPACITY,
    H_HOLDER,
    H_MAGIC,
    H_OWNERS,
    H_SLOTS,
    H_VERSION,
    HEADER_WORDS,
    MAGIC,
    PAGE,
    VERSION,
    WORD,
    Geometry,
)
from store.errors import StoreError

_MADV_POPULATE_WRITE = 23  # madvise(2), Linux 5.14; Python 3.11 has no name for it


def make_file(path: Path, geometry: Geometry) -> None:
    """Makes the file, whole or not at all, readable and writable by this user only.

    Raises:
        StoreError: it exists, or there is no room for it.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreError(f"arena {path}: {error.strerror}") from error
    try:
        os.posix_fallocate(fd, 0, geometry.file_bytes)
        header = {
            H_VERSION: VERSION,
            H_CAPACITY: geometry.capacity_bytes,
            H_SLOTS: geometry.slots,
            H_OWNERS: geometry.owners,
            H_ALIGNMENT: geometry.alignment,
            H_HOLDER: os.getpid(),  # as if this process had died in the middle: the first to lock builds the index
            H_MAGIC: MAGIC,  # last: before it, nobody takes this for an arena
        }
        for word, value in header.items():
            os.pwrite(fd, value.to_bytes(WORD, "little"), word * WORD)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StoreError(f"arena {path}: {geometry.file_bytes} bytes: {error.strerror}") from error
    finally:
        os.close(fd)


def open_file(path: Path) -> tuple[int, Geometry]:
    """A new file description of an arena, and its layout.

    Raises:
        StoreError: no such file, or it is no arena of this version.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise StoreError(f"arena {path}: not there; containers that share it need one /dev/shm (--ipc)") from error
    except OSError as error:
        raise StoreError(f"arena {path}: {error.strerror}") from error
    try:
        return fd, _read_geometry(fd, path)
    except BaseException:
        os.close(fd)
        raise


def _read_geometry(fd: int, path: Path) -> Geometry:
    try:
        header = os.pread(fd, HEADER_WORDS * WORD, 0)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise StoreError(f"arena {path}: {error.strerror}") from error
    if len(header) < HEADER_WORDS * WORD:
        raise StoreError(f"{path} is not an arena: {len(header)} bytes")
    words = memoryview(header).cast("Q")
    if words[H_MAGIC] != MAGIC:
        raise StoreError(f"{path} is not an arena")
    if words[H_VERSION] != VERSION:
        raise StoreError(f"{path} is an arena of version {words[H_VERSION]}; this is version {VERSION}")
    geometry = Geometry(words[H_CAPACITY], words[H_SLOTS], words[H_OWNERS], words[H_ALIGNMENT])
    if size != geometry.file_bytes:
        raise StoreError(f"{path} is a damaged arena: {size} bytes, not {geometry.file_bytes}")
    return geometry


def map_file(fd: int, geometry: Geometry, *, prefault: bool) -> mmap.mmap:
    """The whole file, shared and writable. It is unmapped when the last view of it is gone.

    Raises:
        StoreError: no address space, or no memory to prefault.
    """
    try:
        mapping = mmap.mmap(fd, geometry.file_bytes)
        if prefault:
            _populate(mapping)
    except OSError as error:
        raise StoreError(f"arena: mapping {geometry.file_bytes} bytes: {error.strerror}") from error
    return mapping


def _populate(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # An older kernel: reading a byte of each page maps it, and changes nothing that others may be writing.
        sum(memoryview(mapping)[::PAGE])
