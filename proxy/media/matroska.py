"""Length and frame size of Matroska and WebM (RFC 9559): elements of (id, size, content), nested. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice

from proxy.media.clip import MAX_PARTS, Clip

MAGIC = b"\x1a\x45\xdf\xa3"
SEGMENT, INFO, TRACKS, TRACK, VIDEO, CLUSTER = 0x18538067, 0x1549A966, 0x1654AE6B, 0xAE, 0xE0, 0x1F43B675
TIMESTAMP_SCALE, DURATION, WIDTH, HEIGHT, TIMESTAMP = 0x2AD7B1, 0x4489, 0xB0, 0xBA, 0xE7
HOLDERS = frozenset({SEGMENT, INFO, TRACKS, TRACK, VIDEO})
MAX_DEPTH = 8

Span = tuple[int, int]


def read(data: bytes) -> Clip:
    """Raises IndexError or struct.error where an element is cut short."""
    scale_ns, duration, last, width, height = 1_000_000, 0.0, 0, 0, 0
    for kind, (at, end) in islice(_elements(data, (0, len(data)), 0), MAX_PARTS):
        if kind == TIMESTAMP_SCALE:
            scale_ns = int.from_bytes(data[at:end], "big")
        elif kind == DURATION:
            (duration,) = struct.unpack(">f" if end - at == 4 else ">d", data[at:end])
        elif kind == WIDTH:
            width = max(width, int.from_bytes(data[at:end], "big"))
        elif kind == HEIGHT:
            height = max(height, int.from_bytes(data[at:end], "big"))
        elif kind == CLUSTER:  # its first element says when it begins; a header may say less
            first, _, (begin, until) = _element(data, at, end)
            if first == TIMESTAMP:
                last = max(last, int.from_bytes(data[begin:until], "big"))
    seconds = max(duration, float(last)) * scale_ns / 1e9
    return Clip(seconds if seconds > 0 else None, width * height or None)


def _elements(data: bytes, span: Span, depth: int) -> Iterator[tuple[int, Span]]:
    """Every element in `span` and in those that hold others, in order."""
    at, end = span
    while at < end:
        kind, after, content = _element(data, at, end)
        yield kind, content
        if kind in HOLDERS and depth < MAX_DEPTH:
            yield from _elements(data, content, depth + 1)
        at = after


def _element(data: bytes, at: int, end: int) -> tuple[int, int, Span]:
    """(id, where the next element begins, where its content is) of the element at `at`."""
    kind, begin, _ = _number(data, at)
    marked, begin, bits = _number(data, begin)
    size = marked - (1 << bits)
    endless = size == (1 << bits) - 1  # a live stream: to the end of what holds it
    until = end if endless else min(begin + size, end)
    return kind, until, (begin, until)


def _number(data: bytes, at: int) -> tuple[int, int, int]:
    """(value with its length marker, where it ends, bits behind the marker) of the number at `at`."""
    length = 9 - data[at].bit_length()
    if length > 8:
        raise IndexError("no number has more than eight bytes")
    return int.from_bytes(data[at : at + length], "big"), at + length, 7 * length
