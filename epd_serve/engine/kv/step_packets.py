"""The packets of one prefill step: who travels together, after which layers each packet leaves, and by when.

One packet is layers of all transfers that go to one worker of D and are waited for alike: those whose prompt ends in
this step, which somebody waits for from the step's end on, and those that go on, which have until the end of the next.
So the set-up cost of a packet is paid once, and nothing that can wait goes before what cannot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from epd_serve.engine.kv.link import Link
from epd_serve.engine.kv.link_jobs import Outgoing, PacketJob
from epd_serve.kv.grouping import Cuts, Grouping, Step, spare_s
from epd_serve.kv.plan import LayerPacket, Run


@dataclass(eq=False)
class LinkBatch:
    """The parts of one step that travel together. `cuts`: after which layers packets leave; `left`: how many have."""

    link: Link
    block_bytes: tuple[int, ...]
    ending: bool
    parts: list[tuple[Outgoing, tuple[Run, ...]]] = field(default_factory=list)
    cuts: Cuts = ()
    deadline: float = 0.0
    sent_layers: int = 0

    def plan(self, grouping: Grouping, layer_s: float, tail_s: float, now: float, ahead_s: float) -> float:
        """Decide where to cut, from what is known of the link and the device now.

        `ahead_s`: for how long packets of this step that are not queued yet will go before these. Returns for how long
        these will keep the link busy. Of the tail, in which the last packet hides, half is counted on.
        """
        layers, cost = len(self.block_bytes), self.link.cost()
        nbytes = sum(run.count for _, runs in self.parts for run in runs) * sum(self.block_bytes)
        step = Step(layers, nbytes // layers, layer_s)
        self.deadline = now + layers * layer_s * (1 if self.ending else 2) + tail_s
        backlog_s = self.link.backlog_s(self.deadline) + ahead_s
        slack_s = tail_s / 2 + (0.0 if self.ending else spare_s(step, cost))
        self.cuts = grouping.cuts(replace(step, backlog_s=backlog_s, slack_s=slack_s), cost)
        return cost.seconds(nbytes)

    def due(self, layer: int) -> bool:
        """Whether a packet leaves now that layers [0, layer) are written."""
        return layer in self.cuts and layer > self.sent_layers

    def send(self, upto: int, written: Callable[[], None]) -> None:
        """Queue the packet of the layers that have not left, up to `upto`."""
        packet = LayerPacket(self.sent_layers, upto, tuple((out.key, runs) for out, runs in self.parts))
        outs = tuple(out for out, _ in self.parts)
        generations = tuple(out.generation for out in outs)
        self.link.put(PacketJob(packet, outs, generations, self.block_bytes, written), self.deadline)
        self.sent_layers = upto


class StepPackets:
    """The batches of one step. Empty until `begin`; belongs to the model runner's thread."""

    def __init__(self, grouping: Grouping, layers: int) -> None:
        self._grouping = grouping
        self._layers = layers
        self._batches: dict[tuple[Link, bool], LinkBatch] = {}

    def begin(self) -> None:
        self._batches = {}

    def add(
        self, link: Link, block_bytes: tuple[int, ...], out: Outgoing, runs: tuple[Run, ...], *, ending: bool
    ) -> None:
        """A part of this step that goes to a link."""
        batch = self._batches.setdefault((link, ending), LinkBatch(link, block_bytes, ending))
        batch.parts.append((out, runs))

    def plan(self, layer_s: float, tail_s: float) -> None:
        """After the last `add`."""
        now = time.monotonic()
        ahead_s: dict[Link, float] = {}
        for (link, _), batch in sorted(self._batches.items(), key=lambda item: not item[1].ending):
            ahead_s[link] = batch.plan(self._grouping, layer_s, tail_s, now, ahead_s.get(link, 0.0))

    def leaving(self, layer: int) -> list[LinkBatch]:
        """Those of which a packet leaves after this many layers."""
        return [batch for batch in self._batches.values() if batch.due(layer)]

    def unsent(self) -> list[LinkBatch]:
        """Those with layers that have not left."""
        return [batch for batch in self._batches.values() if batch.sent_layers < self._layers]
