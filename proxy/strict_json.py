"""JSON in and out of the proxy: msgspec where it can, the standard library where only that can, one verdict of both;
what a body takes in memory; and a stage's body in pieces.

msgspec takes a strict subset of what the standard library takes, several times as fast. What it refuses is shown to the
standard library, whose word is final: byte order marks go through as ever, NaN, infinities, nesting beyond reason and
lone surrogates, which no UTF-8 has, do not.

What a client's body takes while it is decoded and after are upper bounds, by counting (`weighed`). A stage's body goes
out in pieces (`encoded`), so that a request's media are held once, whichever stages they are sent to: a body with 32
MiB of media would otherwise be copied for each encoder, for P and for D, and every copy holds up all streams of the
process for the time that it takes.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import msgspec

from proxy import strict_json

_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()
SHOWN_CHARS = 80
"""Of a name that a client made up."""

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

WRITE_BYTES = 256 << 10
ONE_PIECE_BYTES = 64 << 10
"""Up to here copying costs less than further writes do."""
_MARK = secrets.token_hex(16)
"""Stands for an inlined item while the rest is encoded. No client can write it: it never leaves this process."""
_MARKED = re.compile(rb"%s(\d+);" % _MARK.encode())


class LoneSurrogateError(ValueError):
    """A string is no text. `path`: where it is, as `messages[0].role`."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path or 'it'} has half of a surrogate pair, which is no text")
        self.path = path


def decode(raw: bytes | bytearray) -> Any:
    """The value in `raw`. Of a name that an object has twice, the last one counts.

    Raises:
        ValueError: not JSON, a number that is not finite, an integer of thousands of digits; LoneSurrogateError.
        RecursionError: nested too deeply.
    """
    try:
        return _DECODER.decode(raw)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        value = json.loads(raw, parse_constant=_refuse, parse_float=_finite)
        _refuse_lone_surrogates(value, "")
        return value


def encode(value: Any, other: Callable[[object], Any] | None = None) -> bytes:
    """JSON of what `decode` gave, and of `msgspec.Raw` as it is.

    Args:
        other: what to write for whatever else is in it. Raises TypeError where there is nothing.
    """
    return (_ENCODER if other is None else msgspec.json.Encoder(enc_hook=other)).encode(value)


def fields(raw: bytes) -> Mapping[str, msgspec.Raw]:
    """The fields of an object, each as the bytes that it came in, so that taking one away costs nothing per byte.

    Raises:
        ValueError: not a JSON object.
    """
    return _FIELDS.decode(raw)


def _refuse_lone_surrogates(value: Any, path: str) -> None:
    """msgspec refuses them, so that only what it refused is gone through."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise LoneSurrogateError(path) from None
    elif isinstance(value, dict):
        for name, inner in value.items():
            shown = name.encode("ascii", "backslashreplace").decode("ascii")[:SHOWN_CHARS]
            _refuse_lone_surrogates(name, where := f"{path}.{shown}" if path else shown)
            _refuse_lone_surrogates(inner, where)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _refuse_lone_surrogates(inner, f"{path}[{number}]")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


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
