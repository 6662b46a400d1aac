"""P, one link and D in virtual time: when layers are written, packets move and transfers are done. Emulated.

What decides is the stages' own code: group sizes (`epd_serve.kv.grouping`), the link's queue (`…link_queue`) and the
measured lines (`…fit`), which learn the device from what they observe, as they do in a worker. What is emulated is
time: layers and packets take what a `DevicePair` says, everything else takes none. No thread, no sleep, no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.papers.devices.pair import DevicePair
from bench.papers.emulation.clock import Clock
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


class Arrival(NamedTuple):
    at_s: float
    tokens: int


@dataclass
class Prompt:
    """One request. Times are seconds of the virtual clock; `done_s`: all its KV has arrived."""

    arrived_s: float
    tokens: int
    prefilled: int = 0
    prefill_end_s: float = 0.0
    done_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """How long D waits for the KV after the end of prefill."""
        return max(0.0, self.done_s - self.prefill_end_s)


class Packet(NamedTuple):
    """Adjacent layers of so many requests."""

    size_bytes: int
    parts: int


class Moved(NamedTuple):
    packet: Packet
    begun_s: float
    ended_s: float


@dataclass
class PairRun:
    """What one `run` did. KV latency is the total time of its packets on the link."""

    prompts: list[Prompt]
    prefill_s: float = 0.0
    moved: list[Moved] = field(default_factory=list)

    @property
    def kv_s(self) -> float:
        return math.fsum(one.ended_s - one.begun_s for one in self.moved)


class _Chunk(NamedTuple):
    request: int
    begin: int
    end: int
    last: bool


class _Planned(NamedTuple):
    packet: Packet
    deadline: float
    requests: list[int]


class VirtualPair:
    """One P worker, its link to one D worker. What it has learnt stays from one `run` to the next.

    Args:
        step_tokens: no step computes more; a longer prompt is prefilled in chunks.
    """

    def __init__(self, device: DevicePair, mode: Mode, step_tokens: float = math.inf) -> None:
        self._device, self._mode, self._step_tokens = device, mode, step_tokens
        self._link, self._layer = LineFit(*PRIOR_LINK), LineFit(*PRIOR_LAYER)
        self._learns = isinstance(mode.grouping, AdaptiveGrouping)  # the others ask for no line
        self._queue: LinkQueue[Packet | int] = LinkQueue(seconds=self._link.at)  # packets, and requests that end
        self._clock = Clock()
        self._computes = self._sends = False
        self._link_free_s = 0.0
        self._run = PairRun([])
        for size_bytes in PROBES * 2:
            self._link.observe(size_bytes, device.packet_s(size_bytes, 1))

    def run(self, arrivals: Sequence[Arrival]) -> PairRun:
        """Prefill these, first come first served; all that have come by the beginning of a step share it."""
        self._run = PairRun([Prompt(self._clock.now_s + one.at_s, one.tokens) for one in arrivals])
        for one in arrivals:
            self._clock.after(one.at_s, self._begin_step)
        self._clock.run()
        return self._run

    def _begin_step(self) -> None:
        """Begin the next step, unless one runs or nothing waits."""
        chunks = [] if self._computes else self._chunks()
        if not chunks:
            return
        self._computes = True
        device = self._device
        layer_s = device.layer_s([(chunk.begin, chunk.end) for chunk in chunks])
        for cut, packets in self._planned(chunks).items():
            earliest_s = (self._mode.begins_with_layer - 1) * layer_s
            self._clock.after(max((cut - device.tail) * layer_s, earliest_s), self._putting(packets))
        self._clock.after(device.layers * layer_s, lambda: self._end_step(chunks, layer_s))

    def _end_step(self, chunks: list[_Chunk], layer_s: float) -> None:
        if self._learns:
            self._layer.observe(_tokens(chunks), layer_s)
        self._run.prefill_s += self._device.layers * layer_s
        for chunk in chunks:
            if chunk.last:
                self._run.prompts[chunk.request].prefill_end_s = self._clock.now_s
                self._queue.put_end(chunk.request, chunk.request)
        self._wake_link()
        self._computes = False
        self._begin_step()

    def _chunks(self) -> list[_Chunk]:
        """Returns the next step's chunks, none when all that has come is done."""
        left, chunks = self._step_tokens, []
        for number, one in enumerate(self._run.prompts):
            size = int(min(one.tokens - one.prefilled, left))
            if size > 0 and one.arrived_s <= self._clock.now_s:
                begin, one.prefilled = one.prefilled, one.prefilled + size
                chunks.append(_Chunk(number, begin, one.prefilled, one.prefilled == one.tokens))
                left -= size
        return chunks

    def _planned(self, chunks: list[_Chunk]) -> dict[int, list[_Planned]]:
        """Returns by last layer the packets that leave then."""
        device, cost, now_s = self._device, LinkCost(self._link.a, self._link.b), self._clock.now_s
        layer_s = self._layer.at(_tokens(chunks))
        tail_s, step_s = device.tail * layer_s, device.layers * layer_s
        step_spare_s = spare_s(Step(device.layers, device.layer_bytes(_tokens(chunks)), layer_s), cost)
        packets: dict[int, list[_Planned]] = {}
        for last in (True, False):
            alike = [chunk for chunk in chunks if chunk.last is last]
            deadline = now_s + (step_s if last else 2 * step_s)
            busy_s = max(0.0, self._link_free_s - now_s) + cost.s_per_byte * self._queue.backlog_bytes(deadline)
            backlog_s = busy_s + tail_s if busy_s else 0.0  # KV is written a tail earlier than layers end
            slack_s = tail_s + (0.0 if last else step_spare_s)
            for together in filter(None, [alike] if self._mode.merged else [[chunk] for chunk in alike]):
                layer_bytes = device.layer_bytes(_tokens(together))
                step, first = Step(device.layers, layer_bytes, layer_s, backlog_s, slack_s), 0
                for cut in self._mode.grouping.cuts(step, cost):
                    packet = Packet(layer_bytes * (cut - first), len(together))
                    requests = [chunk.request for chunk in together]
                    packets.setdefault(cut, []).append(_Planned(packet, deadline, requests))
                    first = cut
        return packets

    def _putting(self, packets: list[_Planned]) -> Callable[[], None]:
        def put() -> None:
            for one in packets:
                self._queue.put(one.packet, one.deadline, one.packet.size_bytes, one.requests)
            self._wake_link()

        return put

    def _wake_link(self) -> None:
        """An idle link takes its next packet when all that comes at this moment is here."""
        if not self._sends:
            self._sends = True
            self._clock.after(0.0, self._send)

    def _send(self) -> None:
        """Note the transfers that have ended, and begin to move the next packet."""
        begun_s = self._clock.now_s
        while isinstance(job := self._queue.take(begun_s), int):
            self._run.prompts[job].done_s = begun_s
        assert not isinstance(job, float), "nothing else uses this wire"
        self._sends = job is not None
        if job is not None:
            took_s = self._device.packet_s(job.size_bytes, job.parts)
            if self._learns:
                self._link.observe(job.size_bytes, took_s)
            self._link_free_s = begun_s + took_s
            self._run.moved.append(Moved(job, begun_s, self._link_free_s))
            self._clock.after(took_s, self._send)


def _tokens(chunks: Sequence[_Chunk]) -> int:
    return sum(chunk.end - chunk.begin for chunk in chunks)
