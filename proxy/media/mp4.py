"""Length and frame size of MP4, MOV, M4A and 3GP (ISO 14496-12): boxes of (size, type, content), nested. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice

from proxy.media.clip import MAX_PARTS, Clip

FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")
HOLDERS = frozenset({b"moov", b"trak", b"mdia", b"minf", b"stbl", b"mvex"})
MAX_DEPTH = 8
MAX_ENTRIES = 200_000
"""Entries of a table of durations: one each for the frames of the longest clip at a varying rate."""

Span = tuple[int, int]


def read(data: bytes) -> Clip:
    """Raises struct.error or IndexError where a box is cut short."""
    durations: list[float] = []
    pixels: list[int] = []
    scale, movie_scale = 0, 0
    for kind, (at, end) in islice(_boxes(data, (0, len(data)), 0), MAX_PARTS):
        if kind in (b"mvhd", b"mdhd"):
            long = data[at] == 1
            scale, duration = struct.unpack_from(">IQ" if long else ">II", data, at + (20 if long else 12))
            movie_scale = scale if kind == b"mvhd" else movie_scale
            if duration not in (0, (1 << (64 if long else 32)) - 1):
                durations.append(duration / scale)
        elif kind == b"mehd":  # of a fragmented file, whose mvhd says 0
            duration = int.from_bytes(data[at + 4 : at + (12 if data[at] == 1 else 8)], "big")
            durations.append(duration / movie_scale)
        elif kind == b"tkhd":  # width and height are the last fields, 16.16 each
            width, height = struct.unpack_from(">II", data, end - 8)
            pixels.append((width >> 16) * (height >> 16))
        elif kind == b"stts":  # how long every sample lasts: what a decoder goes by
            durations.append(_stts(memoryview(data)[at:end]) / scale)
    return Clip(max(durations, default=None), max(pixels, default=0) or None)


def _boxes(data: bytes, span: Span, depth: int) -> Iterator[tuple[bytes, Span]]:
    """Every box in `span` and in those that hold others, in order."""
    at, end = span
    while at + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, at)
        begin = at + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, begin)
            begin += 8
        elif size == 0:
            size = end - at
        if size < begin - at:
            return
        until = min(at + size, end)
        yield kind, (begin, until)
        if kind in HOLDERS and depth < MAX_DEPTH:
            yield from _boxes(data, (begin, until), depth + 1)
        at += size


def _stts(box: memoryview) -> int:
    """Sum of count x delta over the table; over its beginning, where it has more entries than any clip needs."""
    (entries,) = struct.unpack_from(">I", box, 4)
    end = 8 + 8 * min(entries, (len(box) - 8) // 8, MAX_ENTRIES)
    return sum(count * delta for count, delta in struct.iter_unpack(">II", box[8:end]))
