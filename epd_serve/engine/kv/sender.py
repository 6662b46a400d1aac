"""P's worker side: cuts each step's KV into packets of g layers as the forward pass produces them.

EPD-Serve §3.3, asynchronous overlap: vLLM calls `layer_saved` after each attention layer; every g layers a packet per
running transfer goes to the queue of its link, which sends while the next layers compute. `flush` sweeps what hooks
missed (they vanish under full graphs). Layers are counted, names are not trusted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from epd_serve.engine.kv.link import DoneJob, Link, Outgoing, PacketJob
from epd_serve.engine.kv.transport import LayerPacket
from epd_serve.kv.plan import Run, coalesce
from epd_serve.trace import Trace
from epd_serve.wire import TransferKey

_IDLE_WAIT_S = 0.002


@dataclass(frozen=True)
class ChunkJob:
    """What one step computes of one transfer: block pairs that become whole, and whether the prompt ends here.

    Attributes:
        target: D's instance and incarnation; endpoint: its worker of this rank.
        src, dst: block ids at P and at D, same length.
    """

    key: TransferKey
    request: str
    target: str
    endpoints: tuple[str, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]
    last: bool


@dataclass
class _Transfer:
    out: Outgoing
    link: Link
    ending: bool = False  # its DONE is queued: nothing may follow

    def end(self, *, ok: bool, reason: str = "") -> None:
        self.ending = True
        self.link.put(DoneJob(self.out, self.out.generation, ok, reason))


class Sender:
    """Owns the links of one P worker and the transfers on them.

    Args:
        group_layers: g, layers per packet.
        open_link: makes the link to an endpoint; called once per endpoint with the callback for ended transfers.
        mark_written: records on the device that the KV of the layers so far is written, and returns how to wait.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_layers: int,
        group_layers: int,
        open_link: Callable[[str, Callable[[Outgoing], None]], Link],
        mark_written: Callable[[], Callable[[], None]],
        trace: Trace,
    ) -> None:
        self._rank = rank
        self._num_layers = num_layers
        self._group = group_layers
        self._open_link = open_link
        self._mark_written = mark_written
        self._trace = trace
        self._links: dict[str, Link] = {}
        self._step: list[tuple[_Transfer, tuple[Run, ...], bool]] = []
        self._layer = 0
        self._packed = 0
        self._transfers: dict[str, _Transfer] = {}  # by request id, until reported
        self._finished: set[str] = set()  # of those, the ones vLLM has finished
        self._changed = threading.Condition()
        self._over: set[str] = set()  # of those, the ones whose transfer has ended; guarded by _changed

    def warm(self, endpoints: Iterable[str]) -> None:
        """Open links before traffic."""
        for endpoint in endpoints:
            self._link(endpoint)

    def fence(self, preempted: Iterable[str]) -> None:
        """On return no packet of these requests is being read, and none that is queued will be."""
        for request in preempted:
            if request in self._transfers:
                self._transfers[request].out.invalidate()

    def begin_step(self, chunks: Iterable[ChunkJob], stops: Iterable[str], preempted: Iterable[str]) -> None:
        """Take the step's metadata (`stops` and `preempted` are request ids).

        Preempted transfers are fenced before this step's forward pass can overwrite their blocks.
        """
        self._step, self._layer, self._packed = [], 0, 0
        self.fence(preempted)
        for request in stops:
            transfer = self._transfers.get(request)
            if transfer is not None and not transfer.ending:
                transfer.out.skip()
                transfer.end(ok=False, reason="cancelled")
        for chunk in chunks:
            transfer = self._transfers.get(chunk.request)
            if transfer is None:
                out = Outgoing(chunk.key, chunk.request, chunk.target)
                transfer = self._transfers[chunk.request] = _Transfer(out, self._link(chunk.endpoints[self._rank]))
            self._step.append((transfer, coalesce(chunk.src, chunk.dst), chunk.last))

    def layer_saved(self) -> None:
        """One more layer's KV is (being) written."""
        if self._step and self._layer < self._num_layers:
            self._layer += 1
            if self._layer - self._packed >= self._group or self._layer == self._num_layers:
                self._pack(self._layer)

    def flush(self) -> None:
        """The forward pass has ended: send layers that no hook announced, and close transfers that are complete."""
        if self._step and self._packed < self._num_layers:
            self._pack(self._num_layers)
        for transfer, _, last in self._step:
            if last and not transfer.ending:
                self._trace.stamp(transfer.out.key.transfer_id, "prefill_end")
                transfer.end(ok=True)
        self._step = []

    def take_over(self, finished: Iterable[str], *, idle: bool) -> set[str]:
        """Requests both finished by vLLM and over on the link, each reported once. An idle step waits briefly."""
        self._finished.update(request for request in finished if request in self._transfers)
        with self._changed:
            if idle and self._finished and not self._over & self._finished:
                self._changed.wait(_IDLE_WAIT_S)
            both = self._over & self._finished
            self._over -= both
        self._finished -= both
        for request in both:
            del self._transfers[request]
        return both

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _pack(self, upto: int) -> None:
        written = self._mark_written()
        for transfer, runs, _ in self._step:
            if runs and not transfer.ending:
                packet = LayerPacket(self._packed, upto, ((transfer.out.key, runs),))
                transfer.link.put(PacketJob(transfer.out, transfer.out.generation, packet, written))
        self._packed = upto

    def _link(self, endpoint: str) -> Link:
        if endpoint not in self._links:
            self._links[endpoint] = self._open_link(endpoint, self._ended)
        return self._links[endpoint]

    def _ended(self, out: Outgoing) -> None:
        with self._changed:
            self._over.add(out.request)
            self._changed.notify_all()
