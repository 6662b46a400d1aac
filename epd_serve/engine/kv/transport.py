"""What a KV transport owes: moving one slice of a packet from P's regions to D's, so that the source may be reused.

A link is one P worker and one D worker. The sender side lives in the link's thread at P, the receiver side in the
listener thread at D. `shm` copies through shared staging memory, `mooncake` writes into D's memory one-sidedly.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

from epd_serve import wire
from epd_serve.engine.kv.regions import LinkPieces
from epd_serve.kv.plan import LayerPacket
from epd_serve.wire import TransferKey


class LinkError(Exception):
    """The link is of no more use: the peer is gone, silent, or refuses it."""


SendMessage = Callable[[wire.ToDecodeWorker], None]
AwaitMessage = Callable[[], wire.ToPrefillWorker]  # raises LinkError at the peer deadline


class SendSide(Protocol):
    """P's end of a link, in the link's thread.

    Attributes:
        name: what `Hello` asks for, `shm` or `mooncake`.
        label: what reports call it, e.g. `mooncake/tcp`.
        shares_network: its packets compete with fetches from the second tier, so they make room for them.
        largest_move: bytes that `move` takes at once; the link cuts packets so.
        largest_probe: bytes that `probe` takes at once on the open connection.
    """

    name: str
    label: str
    shares_network: bool
    largest_move: int

    @property
    def largest_probe(self) -> int: ...

    def hello(self) -> tuple[str, int]:
        """(staging path, staging bytes) to put into `Hello`; ("", 0) where none is needed."""
        ...

    def opened(self, ack: wire.HelloAck, pieces: LinkPieces | None) -> None:
        """The peer accepted. `pieces`: what of P's blocks travels here; None: whole blocks. Raises LinkError."""
        ...

    def probe(self, nbytes: int, send: SendMessage, receive: AwaitMessage) -> None:
        """Move bytes of no meaning the way packets go; returns when they are at D. Raises LinkError."""
        ...

    def make_room(self, nbytes: int, receive: AwaitMessage) -> None:
        """Returns when `move` of so many bytes will not wait for the peer. Nothing of P's is held meanwhile."""
        ...

    def move(self, packet: LayerPacket, send: SendMessage, receive: AwaitMessage) -> int:
        """Move one packet; returns its bytes. On return the source blocks may be reused. Raises LinkError."""
        ...

    def staged(self, key: TransferKey) -> int:
        """How many `Packet` messages of this connection had a part of this transfer; forgets it."""
        ...

    def credit(self, seq: int) -> None:
        """D has copied a staged packet out; may also come between packets."""
        ...

    def given_up(self) -> int:
        """How many writes were given up so far, which D's memory may still receive without D's help."""
        ...

    def may_land(self, given_up: int) -> bool:
        """Whether one of the first so many writes that were given up may still change D's blocks."""
        ...

    def close(self) -> None: ...


class ReceiveSide(Protocol):
    """D's end of all links of one transport, in the receiver's thread."""

    name: str
    quarantine_s: float  # how long after silence a late write could still land

    def session(self) -> tuple[str, list[int]]:
        """(session, region base addresses) for `HelloAck`."""
        ...

    def scratch(self) -> tuple[int, int]:
        """(address, bytes) of memory that probes may overwrite at any time, for `HelloAck`."""
        ...

    def attach(self, peer: bytes, hello: wire.Hello, pieces: LinkPieces | None) -> None:
        """A link opens. `pieces`: what of D's blocks travels on it; None: whole blocks. Raises LinkError."""
        ...

    def packet(self, peer: bytes, packet: wire.Packet, dropped: Set[TransferKey]) -> None:
        """Copy a staged packet into the KV cache, but for its parts of `dropped` transfers. Raises LinkError."""
        ...

    def probe(self, peer: bytes, probe: wire.Probe) -> None:
        """Copy staged bytes of no meaning to scratch memory. Raises LinkError."""
        ...

    def close(self) -> None: ...
