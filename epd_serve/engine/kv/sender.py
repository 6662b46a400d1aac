"""P's worker side: hands each step's KV to the links as the forward pass produces it; reports transfers that are over.

EPD-Serve §3.3, asynchronous overlap: vLLM calls `layer_saved` after each attention layer; packets of adjacent layers
(`step_packets.py`) go to the links, which send while the next layers compute. `flush` sweeps what hooks missed: a step
that runs as one full graph calls none, and a chunk of one token looks to vLLM like a step of decodes, which may.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from epd_serve import wire
from epd_serve.engine.kv.layer_clock import LayerClock
from epd_serve.engine.kv.link import Link
from epd_serve.engine.kv.link_jobs import DoneJob, Outgoing
from epd_serve.engine.kv.routes import Route, routes_of
from epd_serve.engine.kv.step_packets import LinkBatch, StepPackets
from epd_serve.kv.grouping import Grouping
from epd_serve.kv.plan import coalesce
from epd_serve.trace import DeviceTrace, Trace
from epd_serve.wake import idle_waiter
from epd_serve.wire import TransferKey
from npu_ops.memory import DeviceMemory


@dataclass(frozen=True)
class ChunkJob:
    """What one step computes of one transfer: block pairs that become whole, and how much of the prompt is to come.

    Attributes:
        target: D's instance and incarnation; endpoints: its workers, by rank.
        src, dst: block ids at P and at D, same length.
        remaining: prompt tokens still to compute after this step.
        computed_at: when the prompt's last step ended, where that was before this one.
    """

    key: TransferKey
    request: str
    target: str
    endpoints: tuple[str, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]
    remaining: int
    computed_at: float = 0.0

    @property
    def last(self) -> bool:
        return self.remaining == 0


class OpenLink(Protocol):
    """Makes the link to one worker of D: its address and rank, and whom to tell when a transfer is over."""

    def __call__(self, endpoint: str, rank: int, on_over: Callable[[Outgoing], None]) -> Link: ...


@dataclass
class _Transfer:
    """`ways`: to each worker of D that this worker sends to. `ending`: its DONEs are queued, nothing may follow."""

    key: TransferKey
    request: str
    ways: list[tuple[Link, Route, Outgoing]]
    ending: bool = False


class Sender:
    """Owns the links of one P worker and the transfers on them. For the model runner's thread, but for `meet`, `part`
    and `report`, which another one may call.

    Args:
        shape: of this worker's KV cache (`regions.shape_of`); its layers' names are those that hooks will say.
        open_link: called once per worker of D that this one sends to.
        on_open: called, from any thread, when the first transfer has begun or the last one has ended.
    """

    def __init__(
        self,
        *,
        shape: Mapping[str, Any],
        grouping: Grouping,
        device: DeviceMemory,
        open_link: OpenLink,
        trace: Trace,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._shape = dict(shape)
        self._layers = int(shape["layers"])
        self._index = {name: index for index, name in enumerate(shape["layer_names"])}
        self._device = device
        self._open_link = open_link
        self._trace = DeviceTrace(trace, device)
        self._on_open = on_open
        self._clock = LayerClock(device, self._layers, self._trace)
        self._grouping = grouping
        self._packets = StepPackets(grouping, self._layers)
        self._links: dict[str, Link] = {}  # guarded by _lock
        self._on_link: Counter[str] = Counter()  # transfers that are not over on it, by address; guarded by _lock
        self._step: list[tuple[_Transfer, bool]] = []  # and whether its prompt ends in this step
        self._saved: set[int] = set()  # layers that this step has announced
        self._layer = 0  # all of [0, _layer) are among them
        self._transfers: dict[str, _Transfer] = {}  # by request id, until reported
        self._finished: set[str] = set()  # of those, the ones vLLM has finished
        self._lock = threading.Lock()
        self._ways_left: dict[str, int] = {}  # per request, links on which it is not over; guarded by _lock
        self._over: set[str] = set()  # requests that are over on all links; guarded by _lock

    @property
    def layer_s(self) -> float:
        """Seconds per layer of the last step that was measured; 0.0 before there was one."""
        return self._clock.last_s

    @property
    def open(self) -> int:
        """Transfers that have begun and not ended. Any thread."""
        return len(self._ways_left)

    def meet(self, peers: Iterable[Sequence[str]]) -> None:
        """Open links before traffic. Each peer is the addresses of its workers, by rank."""
        for endpoints in peers:
            with self._lock:
                self._ways(endpoints)

    def part(self, may_be_at: Callable[[str], bool]) -> None:
        """Close the links to addresses at which nobody is any more; one that carries something at a later call."""
        with self._lock:
            gone = [one for one in self._links if not self._on_link[one] and not may_be_at(one)]
            closing = [self._links.pop(endpoint) for endpoint in gone]
        for link in closing:
            link.close()

    def preempt(self, requests: Iterable[str]) -> None:
        """Nothing queued or under way of these counts any more: their blocks may be reused. Waits for nobody."""
        for request in requests:
            transfer = self._transfers.get(request)
            if transfer is not None:
                for link, _, out in transfer.ways:
                    out.invalidate()
                    if not transfer.ending:
                        link.drop(out.key)

    def begin_step(
        self, chunks: Iterable[ChunkJob], stops: Iterable[str], preempted: Iterable[str], tokens: int
    ) -> None:
        """Take the step's metadata, before its forward pass can overwrite the blocks of what is preempted.

        Args:
            stops, preempted: request ids.
            tokens: that the step computes in all.
        """
        self._step, self._saved, self._layer = [], set(), 0
        self._packets.begin()
        self.preempt(preempted)
        for request in stops:
            self._stop(request)
        for chunk in chunks:
            transfer = self._transfers.get(chunk.request) or self._begin(chunk)
            if not transfer.ending:
                self._step.append((transfer, chunk.last))
                self._pack(self._packets, transfer, chunk)
        if self._step:
            layer_s, tail_s = self._clock.layer_s(tokens), self._clock.tail_s(tokens)
            self._clock.begin(tokens)
            self._reprioritise(time.monotonic() + self._layers * layer_s + tail_s)
            self._packets.plan(layer_s, tail_s)

    def send_late(self, chunks: Iterable[ChunkJob], ended: Iterable[str]) -> None:
        """After `begin_step`: what earlier steps have computed, for which D had no blocks then. It leaves at once.

        Args:
            ended: requests that vLLM had finished by then. Those without a chunk are over.
        """
        packets, complete = StepPackets(self._grouping, self._layers), []
        for chunk in chunks:
            transfer = self._transfers.get(chunk.request) or self._begin(chunk)
            if not transfer.ending:
                self._pack(packets, transfer, chunk)
                if chunk.last:
                    complete.append((transfer, chunk.computed_at))
        packets.plan(0.0, 0.0)
        for layer in range(1, self._layers + 1):
            self._send(packets.leaving(layer), layer)
        for transfer, computed_at in complete:
            self._end(transfer, ok=True, computed_at=computed_at)
        for request in ended:
            self._finished.add(request)
            if request not in self._transfers:
                self._report_over(request)

    def layer_saved(self, name: str) -> None:
        """This layer's KV is (being) written. Only a layer of the cache counts, and only once in a step: a drafter runs
        its layers once per token that it guesses."""
        index = self._index.get(name)
        if not self._step or index is None or index in self._saved:
            return
        self._saved.add(index)
        while self._layer in self._saved:
            self._layer += 1
        leaving = self._packets.leaving(self._layer)
        fence = self._clock.layer(self._device.timed_fence() if leaving else None)
        for batch in leaving:
            assert fence is not None
            batch.send(self._layer, fence.wait)

    def flush(self) -> None:
        """The forward pass has ended: send layers that no hook announced, and close transfers that are complete."""
        if not self._step:
            return
        self._clock.end()
        self._send(self._packets.unsent(), self._layers)
        for transfer, last in self._step:
            if last:
                self._trace.stamp(transfer.key.transfer_id, "prefill_end")
                self._end(transfer, ok=True)
        self._step = []

    def take_over(self, finished: Iterable[str]) -> set[str]:
        """Requests both finished by vLLM and over on all links, each reported once."""
        self._finished.update(request for request in finished if request in self._transfers)
        with self._lock:
            both = self._over & self._finished
            self._over -= both
        self._finished -= both
        for request in both:
            self._transfers.pop(request, None)
        return both

    def report(self) -> list[wire.KvLink]:
        """All links as they are now. Any thread."""
        return [link.snapshot() for link in self._open_links()]

    def look(self) -> None:
        """Ends the stage if a link hangs. To be called about once a second, by one thread."""
        for link in self._open_links():
            link.look()

    def close(self) -> None:
        for link in self._open_links():
            link.close()
        self._trace.close()

    def _open_links(self) -> list[Link]:
        with self._lock:
            return list(self._links.values())

    def _begin(self, chunk: ChunkJob) -> _Transfer:
        with self._lock:
            ways = [
                (link, route, Outgoing(chunk.key, chunk.request, chunk.target, route.senders))
                for link, route in self._ways(chunk.endpoints)
            ]
            self._on_link.update(chunk.endpoints[route.rank] for _, route, _ in ways)
            self._ways_left[chunk.request] = len(ways)
            first = len(self._ways_left) == 1
        if first:
            self._on_open()
        transfer = self._transfers[chunk.request] = _Transfer(chunk.key, chunk.request, ways)
        return transfer

    def _pack(self, packets: StepPackets, transfer: _Transfer, chunk: ChunkJob) -> None:
        runs = coalesce(chunk.src, chunk.dst)
        if runs:
            for link, route, out in transfer.ways:
                packets.add(link, route.block_bytes, out, runs, ending=chunk.last)

    def _send(self, batches: Sequence[LinkBatch], upto: int) -> None:
        """Their layers up to `upto`, all of which were submitted to the device before."""
        if batches:
            fence = self._device.timed_fence()
            for batch in batches:
                batch.send(upto, fence.wait)

    def _reprioritise(self, deadline: float) -> None:
        """What was queued in earlier steps of prompts that end in this one is now as urgent as the rest of them."""
        for transfer, last in self._step:
            for link, _, out in transfer.ways if last else ():
                link.reprioritise(out.key, deadline)

    def _stop(self, request: str) -> None:
        transfer = self._transfers.get(request)
        if transfer is not None and not transfer.ending:
            for link, _, out in transfer.ways:
                out.invalidate()
                link.drop(out.key)
            self._end(transfer, ok=False, reason="cancelled")

    def _end(self, transfer: _Transfer, *, ok: bool, reason: str = "", computed_at: float = 0.0) -> None:
        transfer.ending = True
        ended_at = computed_at or time.monotonic()
        for link, _, out in transfer.ways:
            link.end(DoneJob(out, out.generation, ok, reason, ended_at))
        if not transfer.ways:  # heads that every worker holds are sent by some: this one owes nothing
            self._report_over(transfer.request)

    def _ways(self, endpoints: Sequence[str]) -> list[tuple[Link, Route]]:
        """With the lock held."""
        found = []
        for route in routes_of(self._shape, len(endpoints)):
            endpoint = endpoints[route.rank]
            if endpoint not in self._links:
                self._links[endpoint] = self._open_link(endpoint, route.rank, partial(self._ended, endpoint))
            found.append((self._links[endpoint], route))
        return found

    def _ended(self, endpoint: str, out: Outgoing) -> None:
        """The link to there is through with a transfer. Its thread."""
        with self._lock:
            self._on_link[endpoint] -= 1
            self._ways_left[out.request] -= 1
            if self._ways_left[out.request]:
                return
        self._report_over(out.request)

    def _report_over(self, request: str) -> None:
        with self._lock:
            self._ways_left.pop(request, None)
            self._over.add(request)
            last = not self._ways_left
        if last:
            self._on_open()
        idle_waiter.wake()
