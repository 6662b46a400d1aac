"""Group sizes: after which layers of a prefill step a packet leaves (EPD-Serve §3.3, grouped packaging). Pure.

Layer l of a step (1 … L) is written at l·c, c the compute time per layer. A packet of layers (i, j] can start when
layer j is written and the link is free, and takes t = a + b·bytes. What a request sees is how long after the last layer
the last packet arrives. `AdaptiveGrouping` takes the cuts with the least of it and, among those, with the fewest
packets: early layers travel in large packets, which hide, the last ones in small packets, which cannot.

How the cuts are found is `epd_serve.kv.least_exposed`; where c, a and b come from is `epd_serve.kv.fit`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epd_serve.errors import ConfigError
from epd_serve.kv.least_exposed import fewest_packets

Cuts = tuple[int, ...]  # one past the last layer of each packet, increasing; the last one is the number of layers


@dataclass(frozen=True)
class LinkCost:
    """t = setup_s + s_per_byte · bytes, of one packet on one link."""

    setup_s: float
    s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.setup_s + self.s_per_byte * nbytes


@dataclass(frozen=True)
class Step:
    """What one prefill step puts on one link.

    Attributes:
        layers: L.
        layer_bytes: bytes of one layer, of all transfers that share the packets.
        layer_s: compute time per layer.
        backlog_s: the link is busy for so long from the step's beginning on.
        slack_s: so long after the last layer nobody waits for the last packet yet (0 where a prompt ends here). Where
            the prompt goes on, `spare_s` of the next step: more would take the link from that step's own packets.
    """

    layers: int
    layer_bytes: int
    layer_s: float
    backlog_s: float = 0.0
    slack_s: float = 0.0


class Grouping(Protocol):
    """One of the modes below. `name` is what `parse_grouping` reads."""

    @property
    def name(self) -> str: ...

    def cuts(self, step: Step, cost: LinkCost) -> Cuts: ...


def finish_s(cuts: Sequence[int], step: Step, cost: LinkCost) -> float:
    """When the last packet has arrived, from the step's beginning on."""
    free, first = step.backlog_s, 0
    for last in cuts:
        free = max(free, last * step.layer_s) + cost.seconds((last - first) * step.layer_bytes)
        first = last
    return free


def exposed_s(cuts: Sequence[int], step: Step, cost: LinkCost) -> float:
    """How long somebody waits for the last packet."""
    return max(0.0, finish_s(cuts, step, cost) - step.layers * step.layer_s - step.slack_s)


def spare_s(step: Step, cost: LinkCost) -> float:
    """How long the link has nothing to do in such a step: the slack of a chunk which one like it follows."""
    return max(0.0, step.layers * step.layer_s - cost.seconds(step.layers * step.layer_bytes))


@dataclass(frozen=True)
class FixedGrouping:
    """Every `layers_per_packet` layers, the last packet what remains."""

    layers_per_packet: int
    name: str

    def cuts(self, step: Step, cost: LinkCost) -> Cuts:
        return (*range(self.layers_per_packet, step.layers, self.layers_per_packet), step.layers)


@dataclass(frozen=True)
class BulkGrouping:
    """One packet after the last layer."""

    name: str = "bulk"

    def cuts(self, step: Step, cost: LinkCost) -> Cuts:
        return (step.layers,)


@dataclass(frozen=True)
class AdaptiveGrouping:
    """Least exposed time, then fewest packets; no packet below `floor_bytes` unless the step has no more.

    `tolerance` is the part of the least exposed time that is given up for fewer packets. The link's constants are not
    known to a hundredth, while every packet certainly holds the link for another `setup_s` that other transfers wait
    for, and costs both ends a message. 0 asks for the exact minimum.

    Inputs are rounded before they are looked up, so that steps alike share one plan: by at most 0.013 %, always
    towards a slower link, a quicker step and less slack. The cuts then never turn out later than planned, and cost at
    most that part of the step's and the link's time. Coarser is not safe: where the link is only just fast enough,
    0.4 % of a long step is several times the last packet.
    """

    floor_bytes: int
    tolerance: float = 0.01
    name: str = "adaptive"

    def cuts(self, step: Step, cost: LinkCost) -> Cuts:
        if step.layer_bytes * step.layers <= self.floor_bytes:
            return (step.layers,)
        return fewest_packets(
            step.layers,
            least=max(1, -(-self.floor_bytes // step.layer_bytes)),
            layer_s=_down(step.layer_s),
            setup_s=_up(cost.setup_s),
            send_s=_up(cost.s_per_byte * step.layer_bytes),
            backlog_s=_up(step.backlog_s),
            slack_s=_down(step.slack_s),
            tolerance=self.tolerance,
        )


_STEPS = 1 << 14  # a mantissa lies in [½, 1): neighbours are at most 2⁻¹³ of themselves apart


def _up(seconds: float) -> float:
    mantissa, exponent = math.frexp(seconds)
    return math.ldexp(math.ceil(mantissa * _STEPS) / _STEPS, exponent)


def _down(seconds: float) -> float:
    mantissa, exponent = math.frexp(seconds)
    return math.ldexp(math.floor(mantissa * _STEPS) / _STEPS, exponent)


def parse_grouping(text: str, floor_bytes: int) -> Grouping:
    """`adaptive`, `fixed:N`, `layerwise` or `bulk`. Raises ConfigError that names the field."""
    if text == "adaptive":
        return AdaptiveGrouping(floor_bytes)
    if text == "layerwise":
        return FixedGrouping(1, text)
    if text == "bulk":
        return BulkGrouping()
    word, _, number = text.partition(":")
    if word == "fixed" and number.isdecimal() and int(number) > 0:
        return FixedGrouping(int(number), text)
    raise ConfigError(f"{text!r} is none of adaptive, fixed:N, layerwise, bulk", param="--kv-grouping")
