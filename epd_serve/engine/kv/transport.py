"""What a KV transport owes: moving one packet from P's regions to D's, so that the source may be reused on return.

A link is one P worker and one D worker. The sender side lives in the link's thread at P, the receiver side in the
listener thread at D. `shm` copies through shared staging memory, `mooncake` writes into D's memory one-sidedly.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol

from epd_serve import wire
from epd_serve.engine.kv.regions import Layers
from epd_serve.kv.plan import Run
from epd_serve.wire import TransferKey


class LinkError(Exception):
    """The link is of no more use: the peer is gone, silent, or refuses it."""


Part = tuple[TransferKey, tuple[Run, ...]]


@dataclass(frozen=True)
class LayerPacket:
    """Layers [first, last) of some block runs of one or several transfers."""

    first: int
    last: int
    parts: tuple[Part, ...]

    @property
    def blocks(self) -> int:
        return sum(run.count for _, runs in self.parts for run in runs)


SendMessage = Callable[[wire.ToDecodeWorker], None]
AwaitMessage = Callable[[], wire.ToPrefillWorker]  # raises LinkError at the peer deadline


class SendSide(Protocol):
    """P's end of a link."""

    name: str

    def hello(self) -> tuple[str, int]:
        """(staging path, staging bytes) to put into `Hello`; ("", 0) where none is needed."""
        ...

    def opened(self, ack: wire.HelloAck) -> None:
        """The peer accepted."""
        ...

    def move(self, packet: LayerPacket, send: SendMessage, receive: AwaitMessage) -> int:
        """Move one packet; returns its bytes. On return the source blocks may be reused. Raises LinkError."""
        ...

    def credit(self, seq: int) -> None:
        """D has copied a staged packet out; may also come between packets."""
        ...

    def close(self) -> None: ...


class ReceiveSide(Protocol):
    """D's end of all links of one transport."""

    name: str
    quarantine_s: float  # how long after silence a late write could still land

    def session(self) -> tuple[str, list[int]]:
        """(session, region base addresses) for `HelloAck`."""
        ...

    def attach(self, peer: bytes, hello: wire.Hello) -> None:
        """A link opens. Raises LinkError."""
        ...

    def packet(self, peer: bytes, packet: wire.Packet, dropped: Set[TransferKey]) -> None:
        """Copy a staged packet into the KV cache, but for its parts of `dropped` transfers. Raises LinkError."""
        ...

    def close(self) -> None: ...


def packet_bytes(layers: Layers, first: int, last: int, blocks: int) -> int:
    """Size of `blocks` blocks of layers [first, last)."""
    return blocks * sum(region.block_bytes for layer in layers[first:last] for region in layer)
