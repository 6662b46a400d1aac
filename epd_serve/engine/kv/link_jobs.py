"""What a P worker puts on a link: transfers, their packets, and the DONE that ends each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from epd_serve.kv.plan import LayerPacket
from epd_serve.wire import TransferKey


@dataclass(eq=False)
class Outgoing:
    """A transfer on one link.

    Attributes:
        target: instance and incarnation of D that reserved the blocks.
        senders: how many workers of P send to this worker of D.
        generation: raised when what is queued must not be sent any more.
    """

    key: TransferKey
    request: str
    target: str
    senders: int = 1
    generation: int = 0

    def invalidate(self) -> None:
        """From now on nothing that was queued counts; its source blocks may be overwritten at once.

        Waits for nobody. A slice that is being read goes on and takes others' bytes to D, where they do no harm: DONE
        says that the transfer is not whole, or comes after all of it was sent again, over the same blocks and behind
        that slice.
        """
        self.generation += 1


@dataclass(eq=False)
class PacketJob:
    """One packet: layers of some transfers that go to one D worker and are waited for by the same deadline.

    Attributes:
        outs: per part of `packet` its transfer; generations: theirs when the packet was made.
        block_bytes: per layer of the model, the bytes of one block that travel on this link.
        written: waits until the device has written these layers.

    The rest is the link's account of it: slices neither at D nor left out, and what is at D.
    """

    packet: LayerPacket
    outs: tuple[Outgoing, ...]
    generations: tuple[int, ...]
    block_bytes: tuple[int, ...]
    written: Callable[[], None]
    slices_left: int = 0
    began_at: float = 0.0
    busy_s: float = 0.0
    moved_bytes: int = 0
    moved_keys: set[TransferKey] = field(default_factory=set)

    def current(self) -> set[TransferKey]:
        """Transfers whose part of this packet may still be sent."""
        members = zip(self.outs, self.generations, strict=True)
        return {out.key for out, generation in members if out.generation == generation}


@dataclass(frozen=True, eq=False)
class SliceJob:
    """What of a packet moves at once (`epd_serve.kv.slices`), and whose it is."""

    packet: PacketJob
    slice: LayerPacket
    outs: tuple[Outgoing, ...]

    def wanted(self) -> list[Outgoing]:
        """Transfers whose part may still be sent."""
        current = self.packet.current()
        return [out for out in self.outs if out.key in current]


@dataclass(frozen=True, eq=False)
class DoneJob:
    """The end of a transfer.

    Attributes:
        ok: false where the transfer was cancelled.
        prefill_end: when the prompt's last step ended, for what the transfer exposed.
    """

    out: Outgoing
    generation: int
    ok: bool
    reason: str = ""
    prefill_end: float = 0.0

    def wanted(self) -> list[Outgoing]:
        """The transfer: it ends in any case."""
        return [self.out]
