"""P→D transfers as their stamps tell them: packets on the link, P's steps, and what was exposed. Pure.

exposed = max(0, DONE at D - end of prefill)
KV latency = the time that its packets took the link, summed (`span_s`, first packet to DONE, has the pauses too)
overlap = 1 - exposed / KV latency

A packet may carry parts of several transfers, each of which waits for the whole packet. So one transfer alone counts
the whole of its packets, and of transfers that were asked for together (`together`) every packet counts once: their KV
latency is the link's time for all of them, and what is exposed is so of the one that waits longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from epd_serve.errors import StageError
from epd_serve.phases.stamps import Stamp


@dataclass(frozen=True)
class Packet:
    """Layers [first, last) on the link. Times are CLOCK_MONOTONIC seconds.

    Attributes:
        ended: when it had arrived at D. busy_s: how long it took the link, less than from its beginning to its end
            where it waited for another packet to arrive.
    """

    begun: float
    ended: float
    busy_s: float
    first: int
    last: int
    nbytes: int


@dataclass(frozen=True)
class PrefillStep:
    """One forward pass of P. `layers`: when each layer's KV was written, on an accelerator when it was queued."""

    begun: float
    ended: float
    tokens: int
    layers: tuple[float, ...]


@dataclass(frozen=True)
class Transfer:
    """A transfer that arrived.

    Attributes:
        packets: those that carried parts of it, in order. steps: those that computed its prompt.
        first_packet, prefill_end, done: when the first packet began to move, P had computed the prompt, D had DONE.
    """

    id: str
    packets: tuple[Packet, ...]
    steps: tuple[PrefillStep, ...]
    first_packet: float
    prefill_end: float
    done: float

    @property
    def link_s(self) -> float:
        """KV latency."""
        return sum(packet.busy_s for packet in self.packets)

    @property
    def span_s(self) -> float:
        return self.done - self.first_packet

    @property
    def exposed_s(self) -> float:
        return max(0.0, self.done - self.prefill_end)

    @property
    def overlap(self) -> float:
        """Not below 0: what is exposed is also a message, a thread that wakes, D's copy."""
        return max(0.0, 1.0 - self.exposed_s / self.link_s)

    @property
    def nbytes(self) -> int:
        return sum(packet.nbytes for packet in self.packets)

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.link_s

    @property
    def groups(self) -> tuple[int, ...]:
        """Layers per packet, in order."""
        return tuple(packet.last - packet.first for packet in self.packets)


def together(transfers: Sequence[Transfer]) -> Transfer:
    """Transfers that were asked for at one time as one, each packet once.

    End of prefill and DONE are those of the transfer that was exposed longest.
    """
    return replace(
        max(transfers, key=lambda one: one.done - one.prefill_end),
        packets=tuple(sorted({packet for one in transfers for packet in one.packets}, key=lambda one: one.begun)),
        steps=tuple(sorted({step for one in transfers for step in one.steps}, key=lambda one: one.begun)),
        first_packet=min(one.first_packet for one in transfers),
    )


def transfer_of_requests(stamps: Iterable[Stamp]) -> dict[str, str]:
    """Transfer id by request id, as the proxy dispatched them; of several attempts the last."""
    return {stamp.subject: stamp.more["transfer"] for stamp in stamps if "transfer" in stamp.more}


def arrived(stamps: Sequence[Stamp], ids: Iterable[str]) -> dict[str, Transfer]:
    """Those of the transfers `ids` that arrived, whole, by id; the others have stamps missing (yet).

    Raises:
        StageError: a transfer of them failed.
    """
    wanted = set(ids)
    moments: dict[str, dict[str, float]] = {one: {} for one in wanted}
    packets: dict[str, list[Packet]] = {one: [] for one in wanted}
    steps: list[PrefillStep] = []
    for stamp in stamps:
        more = stamp.more
        if stamp.event == "kv_packet":
            packet = Packet(more["t0"], more["t1"], more["busy_s"], more["first"], more["last"], more["bytes"])
            for one in wanted.intersection(more["transfers"]):
                packets[one].append(packet)
        elif stamp.event == "prefill_step":
            steps.append(PrefillStep(more["t0"], stamp.t, more["tokens"], tuple(more["layers"])))
        elif stamp.subject in wanted and stamp.event in _MOMENTS:
            if more.get("ok") is False:
                raise StageError(f"transfer {stamp.subject} failed: {stamp.event} says so", stage=stamp.instance)
            moments[stamp.subject][stamp.event] = stamp.t
    return {
        one: Transfer(
            id=one,
            packets=tuple(sorted(packets[one], key=lambda packet: packet.begun)),
            steps=tuple(
                step for step in steps if at["prefill_start"] <= step.begun and step.ended <= at["prefill_end"]
            ),
            first_packet=at["kv_first"],
            prefill_end=at["prefill_end"],
            done=at["kv_done"],
        )
        for one, at in moments.items()
        if len(at) == len(_MOMENTS) and packets[one]
    }


_MOMENTS = ("prefill_start", "kv_first", "prefill_end", "kv_sent", "kv_done")
