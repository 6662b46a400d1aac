"""What a body takes in memory besides its own bytes, while it is decoded and after: upper bounds, by counting. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

VALUE_BYTES = 64
"""A value and its place in a list, as CPython 3.11 keeps them; beside it what a list of one, or an object of one is."""
LIST_BYTES = 96
OBJECT_BYTES = 192
FIELD_BYTES = 128
WIDEST = 4
"""Bytes that CPython takes for each character of a string that has one from beyond the BMP, an escaped one too."""
STAGE_COPIES = 2
"""P's body and D's, which a request has at once."""

LONG_BYTES = 4 << 10
"""Strings from here on are passed over, since counting takes half a millisecond per MiB and nothing is to be found."""
MAX_HOPS = 10_000
LARGE_BYTES = 1 << 20


class BodyWeight(NamedTuple):
    """
    Attributes:
        size_bytes: of the body. width: of its characters in strings, in bytes. structure_bytes: of its values.
    """

    size_bytes: int
    width: int
    structure_bytes: int

    @property
    def decoding_bytes(self) -> int:
        """While it is decoded: its strings, once more where the standard library has to do it, and its values."""
        return 2 * self.width * self.size_bytes + self.structure_bytes

    def decoded_bytes(self, media_bytes: int) -> int:
        """Returns the bytes of what it was decoded to, and of the stages' bodies but for the media.

        Args:
            media_bytes: of the strings in it that are media, which are ASCII.
        """
        return media_bytes + (self.width + STAGE_COPIES) * (self.size_bytes - media_bytes) + self.structure_bytes


def weighed(raw: bytes | bytearray) -> BodyWeight:
    """What the body `raw` will take."""
    escape = b"\\" if len(raw) > LARGE_BYTES else b"\\u"  # one byte is found thirty times as fast as two
    width = 1 if raw.isascii() and escape not in raw else WIDEST
    structure = 0
    for begin, end in _between_long_strings(raw) if len(raw) > LARGE_BYTES else ((0, len(raw)),):
        structure += VALUE_BYTES * raw.count(b",", begin, end) + LIST_BYTES * raw.count(b"[", begin, end)
        structure += OBJECT_BYTES * raw.count(b"{", begin, end) + FIELD_BYTES * raw.count(b":", begin, end)
    return BodyWeight(len(raw), width, structure)


def _between_long_strings(raw: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Ranges of `raw` outside of which there are only long strings.

    What follows a quote and begins with a letter or a digit is within a string: after a string's end JSON has none.
    """
    begin, hops = 0, 0
    at = raw.find(b'"')
    while at >= 0 and hops < MAX_HOPS:
        end = raw.find(b'"', at + 1)
        if end - at > LONG_BYTES and raw[at + 1 : at + 2].isalnum():
            yield begin, at
            begin = end
        at, hops = end, hops + 1
    yield begin, len(raw)
