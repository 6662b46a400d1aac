"""The bytes of a feature in the second tier: the payload, then a trailer that says what it is.

Payload first, so that it lies aligned and a fetch can land in place. The trailer has a fixed size, names the key, and
carries a checksum of itself: a value that was cut, mixed up or written by another version is refused, never served.

    payload [nbytes] | magic version dimensions dtype_bytes checked | nbytes checksum | key digest | shape | dtype | sum
"""

from __future__ import annotations

import hashlib
import struct

import xxhash

from store.checksum import Bytes, checksum
from store.errors import CorruptFeatureError, StoreError
from store.feature import FeatureMeta

MAGIC = b"EPDfeat\0"
VERSION = 1
MAX_DIMENSIONS = 8
MAX_DTYPE_BYTES = 64

_FIELDS = struct.Struct("<8sHBBB3xQQ16s8Q64s")
_OWN_SUM = struct.Struct("<Q")
TRAILER_BYTES = 256
_PADDING = bytes(TRAILER_BYTES - _FIELDS.size - _OWN_SUM.size)


def encode_trailer(meta: FeatureMeta) -> bytes:
    """The `TRAILER_BYTES` that follow the payload of `meta`.

    Raises:
        StoreError: a shape or dtype that does not fit.
    """
    dtype = meta.dtype.encode()
    if len(meta.shape) > MAX_DIMENSIONS or len(dtype) > MAX_DTYPE_BYTES:
        raise StoreError(
            f"shape {meta.shape} of {meta.dtype}: {MAX_DIMENSIONS} dimensions, {MAX_DTYPE_BYTES} bytes fit"
        )
    try:
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            len(meta.shape),
            len(dtype),
            meta.checksum is not None,
            meta.nbytes,
            meta.checksum or 0,
            _digest(meta.key),
            *meta.shape,
            *[0] * (MAX_DIMENSIONS - len(meta.shape)),
            dtype,
        )
    except struct.error as error:
        raise StoreError(f"shape {meta.shape}: {error}") from error
    body = fields + _PADDING
    return body + _OWN_SUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_trailer(key: str, trailer: bytes | memoryview, value_bytes: int) -> FeatureMeta:
    """What the trailer of a value of `value_bytes` (payload and trailer) says about `key`.

    Raises:
        CorruptFeatureError: it is no trailer of ours, of another version, another key or another size.
    """
    body, own_sum = bytes(trailer[: -_OWN_SUM.size]), trailer[-_OWN_SUM.size :]
    if len(trailer) != TRAILER_BYTES or body[: len(MAGIC)] != MAGIC:
        raise CorruptFeatureError(f"{key}: not a feature of ours")
    _, version, dimensions, dtype_bytes, checked, nbytes, digest, name, *shape, dtype = _FIELDS.unpack_from(body)
    if version != VERSION:
        raise CorruptFeatureError(f"{key}: stored by version {version}; this is version {VERSION}")
    if _OWN_SUM.unpack(own_sum)[0] != xxhash.xxh3_64_intdigest(body):
        raise CorruptFeatureError(f"{key}: its trailer is damaged")
    if name != _digest(key):
        raise CorruptFeatureError(f"{key}: holds the feature of another key")
    if nbytes + TRAILER_BYTES != value_bytes:
        raise CorruptFeatureError(f"{key}: {value_bytes} bytes stored for a feature of {nbytes}")
    return FeatureMeta(
        key=key,
        shape=tuple(shape[:dimensions]),
        dtype=str(dtype[:dtype_bytes], "utf-8"),
        nbytes=nbytes,
        checksum=digest if checked else None,
    )


def verify_payload(meta: FeatureMeta, payload: Bytes) -> None:
    """Raises CorruptFeatureError unless `payload` has the checksum of `meta` (if it has one)."""
    if meta.checksum is not None:
        actual = checksum(payload)
        if actual != meta.checksum:
            raise CorruptFeatureError(f"{meta.key}: checksum {actual:016x}, stored with {meta.checksum:016x}")


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
