"""What proxy workers are told by whoever feeds them, and the frames it travels in: the answer to `GET /watch`.

Both ends come from one start of one program, so there are no versions here. Nothing is pickled: settings and instances
are checked again where they are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from epd_serve.errors import EpdError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.config.keys import ApiKeys
from proxy.config.settings import ProxySettings

MAX_FRAME_BYTES = 16 << 20
_LENGTH_BYTES = 4


class FeedError(EpdError):
    """The other end says what it cannot say: our fault, in one program of two processes."""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric as a process counts it. `samples`: name, labels in order, value."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, tuple[tuple[str, str], ...], float]]


class Row(msgspec.Struct, frozen=True):
    """One instance as the parent knows it.

    Attributes:
        healthy: it answers. reason: why not.
        draining: it is given nothing new.
        served: the parent has seen its KV links used, so a worker that starts later need not wait for them.
        slot: of the shared counters, where its present life is counted.
    """

    instance: Instance
    healthy: bool
    reason: str = ""
    draining: bool = False
    served: bool = False
    slot: int = 0


class Setup(msgspec.Struct, tag=True, frozen=True):
    """Comes first. What a worker is told so the first time holds as long as it lives.

    Attributes:
        rows: of the shared counters.
        grace_s: how long requests in flight may go on when all workers end. drain_s: when only this one does.
        link_grace_s: as of `InstanceTable`.
    """

    settings: ProxySettings
    rows: int
    grace_s: float
    drain_s: float
    link_grace_s: float


class Roster(msgspec.Struct, tag=True, frozen=True):
    """All instances there are. Replaces what was said before.

    Attributes:
        number: a later one has a larger one. From 1.
        wanted: roles that the deployment is to have.
        paused_s: for how long new requests wait yet.
        down: tasks of the parent that feed the workers and do not run, and why.
    """

    number: int
    rows: tuple[Row, ...]
    wanted: frozenset[Role] = frozenset()
    paused_s: float = 0.0
    down: dict[str, str] = {}


class Keys(msgspec.Struct, tag=True, frozen=True):
    """Those of clients from now on. Told before the first roster, too."""

    keys: ApiKeys


Message = TypeVar("Message")
Told = Setup | Roster | Keys


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be told to a worker")


def _restored(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} cannot be told to a worker")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_told: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told, dec_hook=_restored)
_settings: msgspec.msgpack.Decoder[ProxySettings] = msgspec.msgpack.Decoder(ProxySettings, dec_hook=_restored)


def frame(message: Told) -> bytes:
    """The bytes of one message, its length before it. Raises FeedError when it is too large."""
    raw = _encoder.encode(message)
    if len(raw) > MAX_FRAME_BYTES:
        raise FeedError(f"a {type(message).__name__} of {len(raw):,} bytes; {MAX_FRAME_BYTES:,} may travel")
    return len(raw).to_bytes(_LENGTH_BYTES, "big") + raw


class Frames:
    """Puts messages together from the pieces in which they come."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, piece: bytes) -> Iterator[Told]:
        """Those that are whole now. Raises FeedError."""
        self._rest += piece
        while len(self._rest) >= _LENGTH_BYTES:
            length = int.from_bytes(self._rest[:_LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise FeedError(f"a frame of {length:,} bytes; {MAX_FRAME_BYTES:,} may travel")
            if len(self._rest) < _LENGTH_BYTES + length:
                return
            raw, self._rest = self._rest[_LENGTH_BYTES : _LENGTH_BYTES + length], self._rest[_LENGTH_BYTES + length :]
            yield decoded(raw, _told)


def decoded(raw: bytes, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    """Raises FeedError."""
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise FeedError(f"not a message: {error}") from error


def packed_settings(settings: ProxySettings) -> bytes:
    """For a process of the same version of this program."""
    return _encoder.encode(settings)


def unpacked_settings(packed: bytes) -> ProxySettings:
    """Raises FeedError."""
    return decoded(packed, _settings)
