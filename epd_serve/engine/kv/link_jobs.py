"""What a P worker puts on a link: transfers, their packets, and the DONE that ends each; and the queue they wait in."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from epd_serve.kv.link_queue import LinkQueue
from epd_serve.kv.plan import LayerPacket
from epd_serve.kv.slices import cut, packet_bytes
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


class Outbox:
    """What waits for one link, between the threads that put and the one that takes: a `LinkQueue` with a lock.

    Slices of a packet are put one behind the other with one deadline, so they leave in order, and what is more urgent
    goes between them.

    Args:
        seconds: how long the link moves so many bytes.
    """

    def __init__(self, slice_bytes: int, seconds: Callable[[int], float]) -> None:
        self._slice_bytes = slice_bytes
        self._lock = threading.Lock()
        self._queue: LinkQueue[SliceJob | DoneJob] = LinkQueue(seconds)

    def put(self, job: PacketJob, deadline: float) -> None:
        slices = cut(job.packet, job.block_bytes, self._slice_bytes)
        job.slices_left = len(slices)
        with self._lock:
            for part in slices:
                members = {key for key, _ in part.parts}
                outs = tuple(out for out in job.outs if out.key in members)
                self._queue.put(SliceJob(job, part, outs), deadline, packet_bytes(part, job.block_bytes), members)

    def end(self, job: DoneJob) -> None:
        with self._lock:
            self._queue.put_end(job.out.key, job)

    def reprioritise(self, key: TransferKey, deadline: float) -> None:
        with self._lock:
            self._queue.reprioritise(key, deadline)

    def drop(self, key: TransferKey) -> None:
        with self._lock:
            self._queue.drop(key)

    def backlog_bytes(self, deadline: float = math.inf) -> int:
        """Bytes that go before a packet with this deadline."""
        with self._lock:
            return self._queue.backlog_bytes(deadline)

    def take(self, now: float, quiet_until: float) -> SliceJob | DoneJob | float | None:
        """See `LinkQueue.take`."""
        with self._lock:
            return self._queue.take(now, quiet_until)

    def empty(self) -> bool:
        with self._lock:
            return not self._queue.members()
