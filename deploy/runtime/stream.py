"""Streams of bytes to whoever answers on some machine, and what every conversation over one is made of.

A conversation is lines of JSON. One end asks (`asking.py`), the other one answers (`answering.py`); what can be asked
is theirs (`messages.py` of an agent, `deploy/front/messages.py` of front doors). Both ends come from one version of one
program, so there are no versions here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

MAX_LINE_BYTES = 16 << 20


class Writer(Protocol):
    """The part of `asyncio.StreamWriter` that a conversation needs."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def is_closing(self) -> bool: ...


Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, Writer]]]
"""Opens another stream to the same place. The reader takes lines of `MAX_LINE_BYTES`. Raises ConnectionError or
FileNotFoundError: nobody is there, which may be otherwise a moment later."""


def unix_socket(path: Path) -> Open:
    """Of this machine."""

    async def open_it() -> tuple[asyncio.StreamReader, Writer]:
        return await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)

    return open_it


# What is asked.

Call = TypeVar("Call")


class Request(msgspec.Struct, Generic[Call], frozen=True):
    """`number`: of its answers; of the call that is given up."""

    number: int
    call: Call


class GiveUp(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for the answers of the call of this number any more."""


class Epoch(msgspec.Struct, tag=True, frozen=True):
    """The first call on a stream, of whoever decides in this epoch. With it all earlier ones are over."""

    epoch: int


EveryCall = GiveUp | Epoch


# What is answered.


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A ConfigError, or where `config` is false a failure of who was asked."""

    number: int
    message: str
    param: str | None = None
    config: bool = True


class Superseded(msgspec.Struct, tag=True, frozen=True):
    """To whoever still asks when a later epoch has begun: the last word."""

    epoch: int


class Line(msgspec.Struct, tag=True, frozen=True):
    """For the operator; no call's answer."""

    text: str


EveryAnswer = Refused | Superseded | Line


def line_of(message: Any) -> bytes:
    """As it travels."""
    return msgspec.json.encode(message) + b"\n"
