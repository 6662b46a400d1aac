"""JSON in and out of the proxy: msgspec where it can, the standard library where only that can, one verdict of both.

msgspec takes a strict subset of what the standard library takes, several times as fast. What it refuses is shown to the
standard library, whose word is final: lone surrogates and byte order marks go through as ever, NaN, infinities and
nesting beyond reason do not.
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


def decode(raw: bytes | bytearray) -> Any:
    """The value in `raw`. Of a name that an object has twice, the last one counts.

    Raises:
        ValueError: not JSON, a number that is not finite, an integer of thousands of digits.
        RecursionError: nested too deeply.
    """
    try:
        return _DECODER.decode(raw)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return json.loads(raw, parse_constant=_refuse, parse_float=_finite)


def encode(value: Any, other: Callable[[object], Any] | None = None) -> bytes:
    """JSON of what `decode` gave, and of `msgspec.Raw` as it is. UTF-8; ASCII where it holds lone surrogates.

    Args:
        other: what to write for whatever else is in it; may be asked again. Raises TypeError where there is nothing.
    """
    try:
        return (_ENCODER if other is None else msgspec.json.Encoder(enc_hook=other)).encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), default=other or _raw).encode("ascii")


def fields(raw: bytes) -> Mapping[str, msgspec.Raw]:
    """The fields of an object, each as the bytes that it came in, so that taking one away costs nothing per byte.

    Raises:
        ValueError: not a JSON object.
    """
    return _FIELDS.decode(raw)


def _raw(value: object) -> Any:
    if isinstance(value, msgspec.Raw):
        return decode(bytes(value))
    raise TypeError(f"{type(value).__name__} is no JSON")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)
