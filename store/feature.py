"""What is known about a stored feature besides its bytes, how that is written down, whether the bytes are intact, and
what a whole store counts.

A feature's record has a fixed size. It stands in the arena's slot, and in the second tier behind the payload, which so
lies aligned and is fetched in place. It names the key and carries a checksum of itself: what was cut, mixed up or
written by another version is refused, never served.

    magic, version | (key, shape, dtype, nbytes, checksum, true) as msgpack | zeros | checksum

The checksum (xxh3_64) finds flipped bits and torn writes, not forgeries: whoever can write the arena is trusted.
Copying and checksumming release the GIL.
"""

from __future__ import annotations

import mmap
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import xxhash

from store.errors import CorruptFeatureError, StoreError

if TYPE_CHECKING:  # 13 MiB, for nothing in a process that only asks what there is
    import numpy as np
    import numpy.typing as npt

# What callers may pass: any contiguous buffer. collections.abc.Buffer begins with Python 3.12.
Buffer: TypeAlias = "bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[Any]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"  # [nbytes], contiguous

MAX_KEY_BYTES, MAX_DTYPE_BYTES, MAX_DIMENSIONS = 192, 64, 8
RECORD_BYTES = 384

_MAGIC = b"EPDfeat\3"  # the last byte is the version
_SUM_AT = RECORD_BYTES - 8
_PIECE_BYTES = 4 << 20
_fields = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], str, int, int, bool])


@dataclass(frozen=True, slots=True)
class FeatureMeta:
    """One stored feature.

    Attributes:
        key: its name (`store.keys.feature_key`).
        shape: dimensions as the writer gave them, e.g. `(num_tokens, hidden)`.
        dtype: element type as the writer named it, e.g. `bfloat16`; the store never interprets it.
        nbytes: size in bytes.
        checksum: xxh3_64 of the bytes.

    Raises:
        StoreError: a key, shape, dtype or size that no store takes.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    checksum: int = 0

    def __post_init__(self) -> None:
        checked_key(self.key)
        object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        if self.nbytes < 1:
            raise StoreError("a feature has at least one byte")
        if len(self.shape) > MAX_DIMENSIONS or not all(0 <= size < 1 << 63 for size in self.shape):
            raise StoreError(f"shape {self.shape}: at most {MAX_DIMENSIONS} dimensions, none negative")
        if len(self.dtype.encode()) > MAX_DTYPE_BYTES:
            raise StoreError(f"dtype of {len(self.dtype.encode())} bytes; {MAX_DTYPE_BYTES} fit")


def checked_key(key: str) -> bytes:
    """`key` as bytes. Raises StoreError for one that no store takes."""
    try:
        text = key.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"key {key!r}: {error.reason}") from error
    if not 0 < len(text) <= MAX_KEY_BYTES:
        raise StoreError(f"key of {len(text)} bytes; 1 to {MAX_KEY_BYTES} fit")
    return text


def encoded(meta: FeatureMeta) -> bytes:
    """The record of a feature, of `RECORD_BYTES`."""
    fields = (meta.key, meta.shape, meta.dtype, meta.nbytes, meta.checksum, True)  # `astuple` copies, deeply
    record = (_MAGIC + msgspec.msgpack.encode(fields)).ljust(_SUM_AT, b"\0")
    return record + xxhash.xxh3_64_digest(record)


def decoded(record: bytes | memoryview, key: str = "", nbytes: int | None = None) -> FeatureMeta:
    """The feature that a record is of: of `key`, and of so many bytes, where these are given.

    Raises:
        CorruptFeatureError: it is no record of ours, of another version, another key or another size.
    """
    body = bytes(record[:_SUM_AT])
    if not body.startswith(_MAGIC):
        raise CorruptFeatureError(f"{key}: not a feature, or stored by another version")
    try:
        if xxhash.xxh3_64_digest(body) != record[_SUM_AT:]:
            raise StoreError("its checksum is another")
        found = _fields.decode(body.removeprefix(_MAGIC).rstrip(b"\0"))[:-1]
        meta = FeatureMeta(*found)
    except (msgspec.DecodeError, StoreError) as error:
        raise CorruptFeatureError(f"{key}: its record is damaged: {error}") from error
    if key and meta.key != key:
        raise CorruptFeatureError(f"{key}: holds the feature of another key")
    if nbytes is not None and meta.nbytes != nbytes:
        raise CorruptFeatureError(f"{key}: {nbytes} bytes stored for a feature of {meta.nbytes}")
    return meta


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

    In pieces that a cache holds, the checksum of each first: then its copy need not fetch it from memory, which two
    passes over all of it would do twice. Smaller pieces are slower than those two passes
    (`bench/micro/ep/store_speed.py`).
    """
    digest = xxhash.xxh3_64()
    for begin in range(0, len(source), _PIECE_BYTES):
        piece = slice(begin, begin + _PIECE_BYTES)
        digest.update(source[piece].data)
        copy(target[piece], source[piece])
    return digest.intdigest()


@dataclass(frozen=True, slots=True)
class FeatureEntry:
    """A readable feature in a listing.

    Attributes:
        meta: the feature.
        leases: pins of all processes.
        age_s: seconds since it was stored or last used.
    """

    meta: FeatureMeta
    leases: int
    age_s: float


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of a whole store (all processes together); those below the blank line only grow.

    Attributes:
        capacity_bytes: room for features.
        used_bytes: taken by features, alignment and writes in progress included.
        features: readable features.
        leased: features that at least one process pins, dropped ones that wait for a release included.

        puts: features stored.
        hits: `lease` and `get_into` that found their feature.
        misses: `lease` and `get_into` that did not.
        evictions: features dropped to make room.
        corrupt: features dropped because their checksum failed.
        reclaimed: half-written features and leases taken back from dead processes.
    """

    capacity_bytes: int
    used_bytes: int
    features: int
    leased: int

    puts: int
    hits: int
    misses: int
    evictions: int
    corrupt: int
    reclaimed: int
