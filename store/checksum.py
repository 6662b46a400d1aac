"""Copying and checksumming of feature bytes. Both release the GIL, neither knows what an arena is.

xxh3_64 finds flipped bits and torn writes, not forgeries: whoever can write the arena is trusted.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from store.errors import CorruptFeatureError, StoreError
from store.feature import FeatureMeta

if TYPE_CHECKING:  # 13 MiB, for nothing in a process that only asks what there is
    import numpy as np
    import numpy.typing as npt

# What callers may pass: any contiguous buffer. collections.abc.Buffer begins with Python 3.12.
Buffer: TypeAlias = "bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[Any]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"  # [nbytes], contiguous


def as_bytes(data: Buffer, what: str) -> Bytes:
    """`data` as flat bytes, uncopied.

    Raises:
        StoreError: it is no contiguous buffer.
    """
    import numpy as np

    try:
        return np.frombuffer(data, dtype=np.uint8)
    except (TypeError, ValueError, BufferError, AttributeError) as error:
        raise StoreError(f"{what} is not a contiguous buffer: {error}") from error


def checksum(data: Bytes) -> int:
    """xxh3_64 of `data`."""
    return xxhash.xxh3_64_intdigest(data.data)


def verify_payload(meta: FeatureMeta, payload: Bytes) -> None:
    """Raises CorruptFeatureError unless `payload` has the checksum of `meta`."""
    actual = checksum(payload)
    if actual != meta.checksum:
        raise CorruptFeatureError(f"{meta.key}: checksum {actual:016x}, stored with {meta.checksum:016x}")


def copy(target: Bytes, source: Bytes) -> None:
    """Copies `source` over `target`, which has its size."""
    target[:] = source


def copy_with_checksum(target: Bytes, source: Bytes) -> int:
    """Copies, and returns the checksum of `source`.

    Checksum first: it brings the source near for the copy, while a large copy writes past the caches. Measured
    against the other order and against pieces of 0.25 to 4 MB with a streaming checksum, which were slower
    (`bench/micro/ep/store_speed.py`).
    """
    digest = checksum(source)
    copy(target, source)
    return digest
