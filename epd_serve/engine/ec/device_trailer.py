"""What travels behind a feature's bytes from device to device, and how the reader knows that they are the feature's.

    payload [nbytes] | trailer [TRAILER_BYTES]        one object, one transfer, written and verified in device memory

A checksum of every byte on the host would bring the host back in between. So each side computes what its memory can:

    bytes    xxh3 of all bytes                             host-visible memory only
    samples  xxh3 of `_WINDOWS` strided windows of 64 B    every memory: 16 KB copied to the host
    total    sum of all int32 words, on the device         devices that prove at start that they can (`proves_total`)

and the reader checks all that both have. `samples` finds what goes wrong with transfers as a whole: stale or torn
bytes of more than 1/256 of the feature, another feature, a wrong offset. `total` finds any single changed word. What
neither finds, swapped words between two windows, no link or memory fault produces. The trailer has its own checksum
and names key, size and writer; it is written after the payload on the same stream, so that a whole trailer behind
half a payload can only come from the transfer itself.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import torch
import xxhash

from npu_ops.memory import DeviceMemory, proves_total
from store.errors import CorruptFeatureError, StoreError

_MAGIC = b"EPDFEAT\x01"
_FIELDS = struct.Struct("<8s16s16sQBBBxIQQQ8Q16s")  # magic … dtype; a checksum of all this follows
_CHECK = struct.Struct("<Q")
TRAILER_BYTES = 256
_MAX_DIMENSIONS = 8
_MAX_DTYPE = 16
_WINDOWS = 256
_WINDOW_BYTES = 64
_HAS_BYTES, _HAS_TOTAL = 1, 2


@dataclass(frozen=True)
class FeatureShape:
    """How a feature's bytes are to be read. `dtype` as torch names it, without `torch.`."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, feature: torch.Tensor) -> FeatureShape:
        return cls(tuple(feature.shape), str(feature.dtype).removeprefix("torch."))

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        """Flat bytes as the feature."""
        return flat.view(getattr(torch, self.dtype)).view(self.shape)

    def nbytes(self) -> int:
        """What a feature of this shape takes; 0 when torch has no such dtype."""
        dtype = getattr(torch, self.dtype, None)
        return math.prod(self.shape) * dtype.itemsize if isinstance(dtype, torch.dtype) else 0


@dataclass(frozen=True)
class _Sums:
    samples: int
    all_bytes: int | None
    total: int | None


class Integrity:
    """Writes and verifies trailers in one device's memory. Made in a thread that has entered the device.

    Attributes:
        weaker_because: why words are not summed on this device; "" where they are, or where all bytes are checked.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.weaker_because = "" if memory.host_visible else proves_total(memory) or ""

    @property
    def method(self) -> str:
        """What is checked here, for logs."""
        return "bytes" if self._memory.host_visible else "samples" if self.weaker_because else "samples and words"

    def seal(self, key: str, object_: torch.Tensor, shape: FeatureShape, writer: str) -> None:
        """Queues the trailer behind the payload that this thread's stream has queued into `object_`."""
        nbytes = object_.numel() - TRAILER_BYTES
        sums = self._sums(object_[:nbytes])
        if len(shape.shape) > _MAX_DIMENSIONS or len(shape.dtype) > _MAX_DTYPE:
            raise StoreError(f"feature {key}: shape {shape.shape} of {shape.dtype} does not fit a trailer")
        fields = _FIELDS.pack(
            _MAGIC,
            _digest(key),
            _digest(writer),
            nbytes,
            (_HAS_BYTES if sums.all_bytes is not None else 0) | (_HAS_TOTAL if sums.total is not None else 0),
            len(shape.shape),
            len(shape.dtype),
            _WINDOWS,
            sums.samples,
            sums.all_bytes or 0,
            sums.total or 0,
            *shape.shape,
            *(0,) * (_MAX_DIMENSIONS - len(shape.shape)),
            shape.dtype.encode(),
        )
        trailer = (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(TRAILER_BYTES, b"\0")
        self._memory.copy(object_[nbytes:], torch.frombuffer(bytearray(trailer), dtype=torch.uint8))

    def verify(self, key: str, object_: torch.Tensor, *, writer: str = "") -> FeatureShape:
        """Checks an object that a transport has written here. `writer`: it must come from this life of an encoder.

        Raises:
            CorruptFeatureError: it is not this feature, or not all of it.
        """
        nbytes = object_.numel() - TRAILER_BYTES
        if nbytes < 1:
            raise CorruptFeatureError(f"feature {key}: {object_.numel()} bytes are less than a trailer and a byte")
        raw = self._memory.to_host(object_[nbytes:]).numpy().tobytes()
        (check,) = _CHECK.unpack_from(raw, _FIELDS.size)
        if xxhash.xxh3_64_intdigest(raw[: _FIELDS.size]) != check:
            raise CorruptFeatureError(f"feature {key}: its trailer is damaged")
        magic, key_digest, writer_digest, size, has, dims, dtype_length, windows, samples, all_bytes, total, *rest = (
            _FIELDS.unpack_from(raw)
        )
        if magic != _MAGIC or windows != _WINDOWS:
            raise CorruptFeatureError(f"feature {key}: its trailer is of another version")
        if key_digest != _digest(key):
            raise CorruptFeatureError(f"feature {key}: another feature lies under its name")
        if size != nbytes:
            raise CorruptFeatureError(f"feature {key}: {nbytes} bytes came, {size} were sent")
        if writer and writer_digest != _digest(writer):
            raise CorruptFeatureError(f"feature {key}: written by another life of its encoder")
        shape = FeatureShape(tuple(rest[:dims]), rest[-1][:dtype_length].decode("ascii", "replace"))
        if shape.nbytes() != nbytes:
            raise CorruptFeatureError(f"feature {key}: {shape} is not {nbytes} bytes")
        found = self._sums(object_[:nbytes])
        for what, sent, came in (
            ("samples", samples, found.samples),
            ("bytes", all_bytes if has & _HAS_BYTES else None, found.all_bytes),
            ("words", total if has & _HAS_TOTAL else None, found.total),
        ):
            if sent is not None and came is not None and sent != came:
                raise CorruptFeatureError(f"feature {key}: checksum of its {what} is {came:016x}, sent {sent:016x}")
        return shape

    def _sums(self, payload: torch.Tensor) -> _Sums:
        seen = xxhash.xxh3_64()
        for windows in sampled(payload):
            seen.update(self._memory.to_host(windows).contiguous().numpy())
        samples = seen.intdigest()
        if self._memory.host_visible:
            return _Sums(samples, xxhash.xxh3_64_intdigest(payload.numpy()), None)
        return _Sums(samples, None, None if self.weaker_because else self._memory.total(payload))


def sampled(payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Evenly spread windows from the first byte on, and the last bytes; all of a small payload.

    Views: nothing is read before they are copied.
    """
    nbytes = payload.numel()
    last = payload[-_WINDOW_BYTES:]
    if nbytes <= _WINDOWS * _WINDOW_BYTES:
        return payload, last
    step = (nbytes - _WINDOW_BYTES) // (_WINDOWS - 1)
    return payload.as_strided((_WINDOWS, _WINDOW_BYTES), (step, 1)), last


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
