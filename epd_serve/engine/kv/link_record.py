"""What a link has done so far: its counters for reports, and the stamps of its packets and transfers for traces.

Times are this worker's own. A staged packet has arrived when D's credit says so, one that is written one-sidedly when
the write is complete; a packet took the link from its beginning, or the arrival of the one before, to its arrival.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from epd_serve.engine.kv.link_cost import MeasuredCost
from epd_serve.engine.kv.link_jobs import DoneJob, Outgoing, PacketJob
from epd_serve.kv.plan import LayerPacket
from epd_serve.kv.slices import packet_bytes
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey

_BLOCKED_S = 1e-4  # a device that answers sooner was done before

Outcome = Literal["sent", "failed", "cancelled"]


@dataclass
class Counters:
    """As `wire.KvLink` has them, by the same names."""

    packets: int = 0
    layers: int = 0
    bytes: int = 0
    transfers: int = 0
    failed: int = 0
    cancelled: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    transfer_s: float = 0.0


@dataclass
class Move:
    """One slice on its way: what travels of it, from when on."""

    packet: PacketJob
    part: LayerPacket
    nbytes: int
    began: float


@dataclass
class _Transfer:
    """One transfer on this link. `done`: its DONE was sent, its last packets may not have arrived."""

    nbytes: int = 0
    busy_s: float = 0.0
    groups: list[int] = field(default_factory=list)  # layers of each packet
    under_way: int = 0  # slices
    computed_at: float = 0.0
    arrived_at: float = 0.0
    done: tuple[DoneJob, Outcome] | None = None


class LinkRecord:
    """Written by the link's thread; `counters` and `in_flight_bytes` may be read by others, each number for itself.

    Attributes:
        peer: who is at the other end, for the stamps.
    """

    def __init__(self, cost: MeasuredCost, trace: Trace) -> None:
        self.counters = Counters()
        self.peer = ""
        self.in_flight_bytes = 0
        self._cost = cost
        self._trace = trace
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._in_flight: dict[int, Move] = {}  # staged slices by number
        self._free_at = 0.0

    def computed(self, outs: Iterable[Outgoing], asked: float) -> None:
        """The device has written layers of these transfers, for which the link has waited since `asked`."""
        now = time.monotonic()
        if now - asked > _BLOCKED_S:
            for out in outs:
                self._of(out.key).computed_at = now

    def moving(self, packet: PacketJob, part: LayerPacket) -> Move:
        """A slice of a packet begins to move."""
        move = Move(packet, part, packet_bytes(part, packet.block_bytes), time.monotonic())
        packet.began_at = packet.began_at or move.began
        for key, _ in part.parts:
            transfer = self._of(key)
            if not transfer.nbytes:
                self._trace.stamp(key.transfer_id, "kv_first", link=self.peer)
            transfer.under_way += 1
            transfer.nbytes += packet_bytes(_part(part, key), packet.block_bytes)
        return move

    def moved(self, move: Move, staged_seq: int) -> None:
        """Its source is free again. `staged_seq`: number of the message whose credit tells its arrival, 0: arrived."""
        if staged_seq:
            self._in_flight[staged_seq] = move
            self.in_flight_bytes += move.nbytes
        else:
            self._arrived(move)

    def credited(self, seq: int) -> None:
        """D has taken what was staged under this number."""
        move = self._in_flight.pop(seq, None)
        if move is not None:
            self.in_flight_bytes -= move.nbytes
            self._arrived(move)

    def left_out(self, packet: PacketJob) -> None:
        """A slice that nobody wants any more."""
        self._settled(packet, time.monotonic())

    def ended(self, job: DoneJob, outcome: Outcome) -> None:
        """DONE was sent, or cannot be."""
        transfer = self._of(job.out.key)
        transfer.done = (job, outcome)
        transfer.arrived_at = max(transfer.arrived_at, time.monotonic())
        self._close(job.out.key)

    def lost(self) -> None:
        """The connection has ended: nothing that is under way will be heard of."""
        self._in_flight.clear()
        self.in_flight_bytes = 0
        for key in list(self._transfers):
            self._transfers[key].under_way = 0
            self._close(key)

    def _arrived(self, move: Move) -> None:
        now = time.monotonic()
        busy_s = now - max(move.began, self._free_at)
        self._free_at = now
        self._cost.observe(move.nbytes, busy_s)
        self.counters.bytes += move.nbytes
        self.counters.busy_s += busy_s
        packet = move.packet
        packet.busy_s += busy_s
        packet.moved_bytes += move.nbytes
        packet.moved_keys.update(key for key, _ in move.part.parts)
        self._settled(packet, now)
        for key, _ in move.part.parts:
            transfer = self._of(key)
            transfer.under_way -= 1
            transfer.arrived_at = now
            self._close(key)

    def _settled(self, packet: PacketJob, now: float) -> None:
        """A slice of this packet has arrived or was left out; with the last of them the packet is counted."""
        packet.slices_left -= 1
        if packet.slices_left or not packet.moved_bytes:
            return
        first, last = packet.packet.first, packet.packet.last
        self.counters.packets += 1
        self.counters.layers += last - first
        for key in packet.moved_keys & self._transfers.keys():
            self._transfers[key].groups.append(last - first)
            self._transfers[key].busy_s += packet.busy_s
        self._trace.stamp(
            f"link:{self.peer}",
            "kv_packet",
            t0=packet.began_at,
            t1=now,
            busy_s=packet.busy_s,
            first=first,
            last=last,
            bytes=packet.moved_bytes,
            link=self.peer,
            transfers=sorted(key.transfer_id for key in packet.moved_keys),
        )

    def _close(self, key: TransferKey) -> None:
        transfer = self._transfers[key]
        if transfer.done is None or transfer.under_way:
            return
        job, outcome = transfer.done
        del self._transfers[key]
        exposed_s = 0.0
        if outcome == "sent":
            exposed_s = max(0.0, transfer.arrived_at - max(job.prefill_end, transfer.computed_at))
            self.counters.transfers += 1
            self.counters.exposed_s += exposed_s
            self.counters.transfer_s += transfer.busy_s
        elif outcome == "cancelled":
            self.counters.cancelled += 1
        else:
            self.counters.failed += 1
        self._trace.stamp(
            key.transfer_id,
            "kv_sent",
            ok=outcome == "sent",
            link=self.peer,
            bytes=transfer.nbytes,
            packets=len(transfer.groups),
            exposed_ms=round(exposed_s * 1e3, 3),
            groups=transfer.groups,
        )

    def _of(self, key: TransferKey) -> _Transfer:
        return self._transfers.setdefault(key, _Transfer())


def _part(packet: LayerPacket, key: TransferKey) -> LayerPacket:
    return LayerPacket(packet.first, packet.last, tuple(part for part in packet.parts if part[0] == key))
