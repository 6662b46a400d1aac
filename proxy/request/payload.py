"""A stage's request body in pieces, so that a request's media are held once, whichever stages they are sent to.

A body with 32 MiB of media would otherwise be copied for each encoder, for P and for D, and every copy holds up all
streams of the process for the time that it takes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from proxy import strict_json

WRITE_BYTES = 256 << 10
ONE_PIECE_BYTES = 64 << 10
"""Up to here copying costs less than further writes do."""
_MARK = secrets.token_hex(16)
"""Stands for an inlined item while the rest is encoded. No client can write it: it never leaves this process."""
_MARKED = re.compile(rb"%s(\d+);" % _MARK.encode())


class Inlined:
    """A media item as it stands in a body: `head` and `data` are the content of one JSON string, plain ASCII."""

    __slots__ = ("data", "head")

    def __init__(self, head: bytes, data: bytes | memoryview) -> None:
        self.head = head
        self.data = data

    def __str__(self) -> str:
        return str(self.head + self.data, "ascii")

    @property
    def size_bytes(self) -> int:
        return len(self.head) + len(self.data)


class Pieces:
    """A body as the pieces that it is made of, one after another, no more of them at a time than are to be written."""

    def __init__(self, pieces: list[bytes | memoryview]) -> None:
        self._pieces = pieces
        self._size_bytes = sum(map(len, pieces))

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            view = memoryview(piece)
            for at in range(0, len(view), WRITE_BYTES):
                yield view[at : at + WRITE_BYTES]

    def __len__(self) -> int:
        return self._size_bytes


def encoded(body: Mapping[str, Any]) -> bytes | Pieces:
    """JSON for a stage. Whatever JSON could carry in goes out again, each `Inlined` as the string that it is."""
    inlined: list[Inlined] = []

    def mark(value: object) -> str:
        if not isinstance(value, Inlined):
            raise TypeError(f"{type(value).__name__} is no JSON")
        inlined.append(value)
        return f"{_MARK}{len(inlined) - 1};"

    raw = strict_json.encode(body, mark)
    if not inlined:
        return raw
    first, *others = _MARKED.split(raw)
    pieces: list[bytes | memoryview] = [first]
    for index, after in zip(others[::2], others[1::2], strict=True):
        one = inlined[int(index)]
        pieces += (one.head, one.data, after)
    return Pieces(pieces) if sum(map(len, pieces)) > ONE_PIECE_BYTES else b"".join(pieces)
