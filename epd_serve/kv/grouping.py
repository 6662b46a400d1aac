"""Group sizes: after which layers of a prefill step a packet leaves (EPD-Serve §3.3, grouped packaging). Pure.

Layer l of a step (1 … L) is written at l·c, c the compute time per layer. A packet of layers (i, j] can start when
layer j is written and the link is free, and takes t = a + b·bytes. What a request sees is how long after the last layer
the last packet arrives. `AdaptiveGrouping` takes the cuts with the least of it and, among those, with the fewest
packets: early layers travel in large packets, which hide, the last ones in small packets, which cannot.

How the cuts are found is `epd_serve.kv.least_exposed`; where c, a and b come from is `epd_serve.kv.fit`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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

    `tolerance` is the part of the least exposed time that is given up for fewer packets, and once more for the hedge.
    The link's constants are not known to a fiftieth, while every packet certainly holds the link for another `setup_s`
    that other transfers wait for, and costs both ends a message.

    `hedge` is how far off the expected compute time may be, as a part of it. The plan for exactly that time is brittle:
    its packets arrive just before the next one can start, so where layers are a tenth quicker than expected, it exposes
    a quarter more on average, and up to seven times as much. So plans are made for quicker, expected and slower layers,
    and of them and the smallest packets that the floor allows, the one with the least regret over all three is taken,
    then the one with the fewest packets. That is about half a packet more where the link is faster than the compute.

    Without tolerance and hedge the answer is the exact minimum for the expected time. Inputs are rounded before they
    are looked up, so that steps alike share one plan: by at most 0.013 %, always towards a slower link, a quicker step
    and less slack. Coarser is not safe: where the link is only just fast enough, 0.4 % of a long step is several times
    its last packet.
    """

    floor_bytes: int
    tolerance: float = 0.02
    hedge: float = 0.1
    name: str = "adaptive"

    def cuts(self, step: Step, cost: LinkCost) -> Cuts:
        if step.layer_bytes * step.layers <= self.floor_bytes:
            return (step.layers,)
        rounded = Step(step.layers, step.layer_bytes, _down(step.layer_s), _up(step.backlog_s), _down(step.slack_s))
        return _hedged(self, rounded, LinkCost(_up(cost.setup_s), _up(cost.s_per_byte)))

    def plan(self, step: Step, cost: LinkCost) -> Cuts:
        """The cuts if everything takes exactly as long as expected."""
        return fewest_packets(
            step.layers,
            least=self.least_layers(step),
            layer_s=step.layer_s,
            setup_s=cost.setup_s,
            send_s=cost.s_per_byte * step.layer_bytes,
            backlog_s=step.backlog_s,
            slack_s=step.slack_s,
            tolerance=self.tolerance,
        )

    def least_layers(self, step: Step) -> int:
        return max(1, -(-self.floor_bytes // step.layer_bytes))


@lru_cache(maxsize=4096)
def _hedged(policy: AdaptiveGrouping, step: Step, cost: LinkCost) -> Cuts:
    expected = policy.plan(step, cost)
    if not policy.hedge:
        return expected
    possible = [step, *(replace(step, layer_s=step.layer_s * f) for f in (1 - policy.hedge, 1 + policy.hedge))]
    best = [expected, *(policy.plan(other, cost) for other in possible[1:])]
    least_s = [exposed_s(cuts, other, cost) for cuts, other in zip(best, possible, strict=True)]
    given_up_s = policy.tolerance * least_s[0]
    regret_s = {
        cuts: max(exposed_s(cuts, other, cost) - least for other, least in zip(possible, least_s, strict=True))
        for cuts in {*best, _smallest(step.layers, policy.least_layers(step))}
        if cuts == expected or exposed_s(cuts, step, cost) <= least_s[0] + given_up_s
    }
    fair_s = min(regret_s.values()) + given_up_s
    return min(
        (cuts for cuts in regret_s if regret_s[cuts] <= fair_s), key=lambda cuts: (len(cuts), regret_s[cuts], cuts)
    )


def _smallest(layers: int, least: int) -> Cuts:
    """Packets of `least` layers, the first one larger by what is over."""
    return tuple(range(layers - least * (layers // least - 1), layers + 1, least)) if layers >= least else (layers,)


_STEPS = 1 << 14  # a mantissa lies in [½, 1): neighbours are at most 2⁻¹³ of themselves apart


def _up(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.ceil(mantissa * _STEPS) / _STEPS, exponent)


def _down(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.floor(mantissa * _STEPS) / _STEPS, exponent)


_NUMBER = re.compile("[1-9][0-9]{0,5}")  # no model has a million layers, and Python reads no number of any length


def parse_grouping(text: str, floor_bytes: int) -> Grouping:
    """`adaptive`, `fixed:N`, `layerwise` or `bulk`. Raises ConfigError that names the field."""
    if text == "adaptive":
        return AdaptiveGrouping(floor_bytes)
    if text == "layerwise":
        return FixedGrouping(1, text)
    if text == "bulk":
        return BulkGrouping()
    word, _, number = text.partition(":")
    if word == "fixed" and _NUMBER.fullmatch(number):
        return FixedGrouping(int(number), text)
    raise ConfigError(f"{text!r} is none of adaptive, fixed:N, layerwise, bulk", param="--kv-grouping")
