"""JSON in and out of the proxy: msgspec where it can, the standard library where only that can, one verdict of both.

msgspec takes a strict subset of what the standard library takes, several times as fast. What it refuses is shown to the
standard library, whose word is final: byte order marks go through as ever, NaN, infinities, nesting beyond reason and
lone surrogates, which no UTF-8 has, do not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()
SHOWN_CHARS = 80
"""Of a name that a client made up."""


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
