"""P, one link and D on a virtual clock: when layers are written, packets move and transfers are done. Emulated.

What decides is the stages' own code: group sizes (`epd_serve.kv.grouping`), the link's queue (`…link_queue`) and the
measured lines (`…fit`), which learn the device from what they observe, as they do in a worker. What is emulated is
time: layers and packets take what a `Device` says, everything else takes none. No thread, no sleep, no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.devices.device import Device
from epd_serve.kv.fit import LineFit
from epd_serve.kv.grouping import AdaptiveGrouping, Grouping, LinkCost, Step, spare_s
from epd_serve.kv.link_queue import LinkQueue

PROBES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)  # bytes, each twice, as a link does when it opens
PRIOR_LINK = (1e-3, 1e-9)  # a + b·bytes, before probes
PRIOR_LAYER = (1e-3, 1e-6)  # c of a step of so many tokens, before steps


@dataclass(frozen=True)
class Mode:
    """How a step's KV becomes packets.

    Attributes:
        merged: the requests of a step share its packets; else each request has its own.
        begins_with_layer: nothing leaves before this layer begins to compute.
    """

    name: str
    grouping: Grouping
    merged: bool = True
    begins_with_layer: int = 0


@dataclass(frozen=True)
class Arrival:
    at_s: float
    tokens: int


@dataclass
class Outcome:
    """One request's way. Times are seconds of the virtual clock."""

    arrived_s: float
    tokens: int
    prefilled: int = 0
    prefill_end_s: float = 0.0
    done_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Design §6: DONE minus the end of prefill."""
        return max(0.0, self.done_s - self.prefill_end_s)


@dataclass(frozen=True)
class Packet:
    """Adjacent layers of so many requests."""

    nbytes: int
    parts: int


@dataclass(frozen=True)
class Moved:
    packet: Packet
    begun_s: float
    ended_s: float


@dataclass
class Served:
    """What one `serve` did. KV latency is the total time of its packets on the link (design §6)."""

    outcomes: list[Outcome]
    prefill_s: float = 0.0
    moved: list[Moved] = field(default_factory=list)

    @property
    def kv_s(self) -> float:
        return math.fsum(one.ended_s - one.begun_s for one in self.moved)


@dataclass(frozen=True)
class _Chunk:
    request: int
    begin: int
    end: int
    last: bool


@dataclass(frozen=True)
class _Done:
    request: int


class Pair:
    """One P worker, its link to one D worker. What it has learnt stays from one `serve` to the next.

    Args:
        step_tokens: no step computes more; a longer prompt is prefilled in chunks.
    """

    def __init__(self, device: Device, mode: Mode, step_tokens: float = math.inf) -> None:
        self._device, self._mode, self._step_tokens = device, mode, step_tokens
        self._link = LineFit(*PRIOR_LINK)
        self._layer = LineFit(*PRIOR_LAYER)
        self._learns = isinstance(mode.grouping, AdaptiveGrouping)  # the others ask for no line
        self._queue: LinkQueue[Packet | _Done] = LinkQueue(seconds=self._link.at)
        self._now = 0.0  # P
        self._free = 0.0  # the link: free from then on
        self._served = Served([])
        for nbytes in PROBES * 2:
            self._link.observe(nbytes, device.packet_s(nbytes, 1))

    def serve(self, arrivals: Sequence[Arrival]) -> Served:
        """Prefill these, first come first served; all that have come by the beginning of a step share it."""
        start = self._now = self._free = max(self._now, self._free)
        self._served = Served([Outcome(start + one.at_s, one.tokens) for one in arrivals])
        while chunks := self._scheduled():
            self._prefill(chunks)
        self._move(math.inf)
        return self._served

    def _scheduled(self) -> list[_Chunk]:
        """The next step's chunks, none when all is done. With nothing to do, P's clock moves on to the next arrival."""
        left = [(n, one) for n, one in enumerate(self._served.outcomes) if one.prefilled < one.tokens]
        if left:
            self._now = max(self._now, min(one.arrived_s for _, one in left))
        room, chunks = self._step_tokens, []
        for number, one in left:
            size = min(one.tokens - one.prefilled, room)
            if one.arrived_s <= self._now and size > 0:
                end = one.prefilled + int(size)
                chunks.append(_Chunk(number, one.prefilled, end, end == one.tokens))
                one.prefilled = end
                room -= size
        return chunks

    def _prefill(self, chunks: list[_Chunk]) -> None:
        device, begun = self._device, self._now
        tokens = sum(chunk.end - chunk.begin for chunk in chunks)
        layer_s = device.layer_s([(chunk.begin, chunk.end) for chunk in chunks])
        packets = self._planned(chunks, tokens)
        for layer in range(1, device.layers + 1):
            written = begun + (layer - device.tail) * layer_s
            self._move(max(written, begun + (self._mode.begins_with_layer - 1) * layer_s))
            for packet, deadline, requests in packets.get(layer, ()):
                self._queue.put(packet, deadline, packet.nbytes, requests)
        self._now = begun + device.layers * layer_s
        if self._learns:
            self._layer.observe(tokens, layer_s)
        self._served.prefill_s += device.layers * layer_s
        for chunk in chunks:
            if chunk.last:
                self._served.outcomes[chunk.request].prefill_end_s = self._now
                self._queue.put_end(chunk.request, _Done(chunk.request))

    def _planned(self, chunks: list[_Chunk], tokens: int) -> dict[int, list[tuple[Packet, float, list[int]]]]:
        """By last layer: the packets that leave then, with their deadline and whose they are."""
        device, cost = self._device, LinkCost(self._link.a, self._link.b)
        layer_s = self._layer.at(tokens)
        tail_s, step_s = device.tail * layer_s, device.layers * layer_s
        spare = spare_s(Step(device.layers, device.layer_bytes(tokens), layer_s), cost)
        packets: dict[int, list[tuple[Packet, float, list[int]]]] = {}
        for last in (True, False):
            alike = [chunk for chunk in chunks if chunk.last is last]
            deadline = self._now + (step_s if last else 2 * step_s)
            busy_s = max(0.0, self._free - self._now) + cost.s_per_byte * self._queue.backlog_bytes(deadline)
            backlog_s = busy_s + tail_s if busy_s else 0.0  # KV is written a tail earlier than layers end
            slack_s = tail_s + (0.0 if last else spare)
            for together in [alike] if self._mode.merged else [[chunk] for chunk in alike]:
                if not together:
                    continue
                layer_bytes = device.layer_bytes(sum(chunk.end - chunk.begin for chunk in together))
                step = Step(device.layers, layer_bytes, layer_s, backlog_s, slack_s)
                first = 0
                for cut in self._mode.grouping.cuts(step, cost):
                    packet = Packet(layer_bytes * (cut - first), len(together))
                    packets.setdefault(cut, []).append((packet, deadline, [chunk.request for chunk in together]))
                    first = cut
        return packets

    def _move(self, until: float) -> None:
        """The link works through its queue; no packet begins at or after `until`."""
        while self._free < until:
            job = self._queue.take(self._free)
            assert not isinstance(job, float), "nothing else uses this wire"
            if job is None:
                if until < math.inf:
                    self._free = until
                return
            if isinstance(job, _Done):
                self._served.outcomes[job.request].done_s = self._free
                continue
            seconds = self._device.packet_s(job.nbytes, job.parts)
            if self._learns:
                self._link.observe(job.nbytes, seconds)
            self._served.moved.append(Moved(job, self._free, self._free + seconds))
            self._free += seconds
