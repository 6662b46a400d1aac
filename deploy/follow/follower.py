"""One decision: what will come, what that needs, which moves help, which of them may be made. Pure.

The same on the clock of a deployment (`live.py`) and on a simulated one (`simulated.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deploy.change.types import Kind
from deploy.follow.forecast import HARDLY_EVER, NEVER, above, followed, surely, upper, usual
from deploy.follow.moves import TRADE_S, Outlook, added, busiest, counts_of, forbidden, given_up, in_vain, propose
from deploy.follow.plans import Plans, consider
from deploy.follow.shares import propose_shares
from deploy.follow.types import Decision, Limits, Memory, Needs, Observation, by_group, parts_of
from epd_serve.layout_parser import parse

TEXT: Kind = "text"
BACKLOG_S = 30.0
"""In which what waits is to be worked off."""
MOST_CALM = 16.0
FORGET_S = 3600.0
"""After which a decision that was taken back too soon no longer makes others slower."""
REST_S, MOST_REST_S = 600.0, 7200.0
"""For how long a layout that could not be reached is not tried again: each time twice as long."""


def step(seen: Observation, memory: Memory, limits: Limits, plans: Plans | None = None) -> tuple[Memory, Decision]:
    """Decide. To be called every `limits.every_s`, with the memory that the call before returned; what is then done is
    told to it by `moved`, and what came to nothing by `failed`.

    Args:
        plans: what the planner has answered; None where the groups of the layout are to stay.
    """
    trends = {kind: followed(memory.trends.get(kind), count) for kind, count in seen.came.items()}
    ahead = (seen.start_s + limits.every_s) / limits.every_s
    rates = {kind: max(upper(trend, ahead), surely(seen.came[kind])) / seen.window_s for kind, trend in trends.items()}
    coming = needed(rates, seen)
    parts = _with_backlog(coming, seen)
    need = by_group(parts)
    outlook = _outlook(seen, memory, limits)
    quiet_s = limits.quiet_s * memory.calm
    needs = (*((at_s, one) for at_s, one in memory.needs if at_s > seen.at_s - quiet_s), (seen.at_s, need))
    since_s = seen.at_s if memory.since_s is None else memory.since_s
    if needs[0][1].keys() != need.keys():  # other groups, of which nobody knows yet what was needed
        since_s, needs = seen.at_s, needs[-1:]
    memory = replace(memory, since_s=since_s, trends=trends, needs=needs)

    if seen.devices is not None:
        limits = replace(limits, devices=min(limits.devices, seen.devices))
    text = needed({kind: rate for kind, rate in rates.items() if kind == TEXT}, seen)
    peak = _peak(seen, memory, quiet_s)
    steady = {kind: usual(trend) / seen.window_s for kind, trend in trends.items()}
    relieves, _ = busiest(need, counts_of(seen.layout), limits.use)
    regroup = consider(seen, memory, rates, steady, relieves, limits, plans)
    memory = regroup.memory
    chosen, refused = None, []
    shares = [*propose_shares(seen, parts, limits)]
    for move in (*shares, *propose(seen, need, by_group(coming), by_group(text), peak, limits), *regroup.moves):
        fixed = limits.fixed_shares if move.core_share else ""
        if not (why := fixed or forbidden(move, seen, need, memory, outlook)):
            chosen = move
            break
        refused.append((move, why))
    return memory, Decision(
        seen.at_s,
        str(seen.layout),
        rates,
        need,
        peak,
        chosen,
        tuple(refused),
        regroup.why,
        regroup.question,
        seen.costs,
    )


def lacking(seen: Observation, memory: Memory, limits: Limits, decision: Decision) -> tuple[int, ...]:
    """How many devices each copy has that would be wanted, too, if all of `limits.devices` were there, of the groups of
    the layout.

    Args:
        memory: with which the decision was made.
    """
    if seen.devices is None:
        return ()
    _, other = step(replace(seen, devices=None), memory, limits)
    counts = decision.chosen.counts if decision.chosen is not None else counts_of(seen.layout)
    if other.chosen is None or other.chosen.counts.keys() != counts.keys():  # the groups are about to be others
        return ()
    more = {name: count - counts[name] for name, count in other.chosen.counts.items()}
    return tuple(parse(name).groups[0].tp for name, count in more.items() for _ in range(count))


def needed(rates: Mapping[Kind, float], seen: Observation) -> Needs:
    """Group-seconds a second, by part, for so many requests a second."""
    return {
        part: sum(rate * seen.costs[kind].get(part, 0.0) for kind, rate in rates.items())
        for part in parts_of(counts_of(seen.layout), seen.shares)
    }


def _with_backlog(needs: Needs, seen: Observation) -> Needs:
    return {name: busy + seen.backlog.get(name, 0.0) / BACKLOG_S for name, busy in needs.items()}


def _outlook(seen: Observation, before: Memory, limits: Limits) -> Outlook:
    late, certain = (_late(seen, limits, margin) for margin in (HARDLY_EVER, NEVER))
    rising = any(kind in before.trends and above(before.trends[kind], count) for kind, count in seen.came.items())
    return Outlook(late, certain, rising)


def _late(seen: Observation, limits: Limits, margin: float) -> frozenset[str]:
    """Groups that are busier than they may be, even if no more comes than with this margin."""
    sure = needed({kind: surely(count, margin) / seen.window_s for kind, count in seen.came.items()}, seen)
    counts, need = counts_of(seen.layout), by_group(_with_backlog(sure, seen))
    return frozenset(name for name, busy in need.items() if busy > limits.use * counts[name])


def _peak(seen: Observation, memory: Memory, quiet_s: float) -> Needs:
    """The most of the quiet time. Who has not looked for so long takes all that there is to be needed."""
    assert memory.since_s is not None
    counts = counts_of(seen.layout)
    if seen.at_s - memory.since_s < quiet_s:
        return {name: float(count) for name, count in counts.items()}
    return {name: max(need.get(name, 0.0) for _, need in memory.needs) for name in counts}


def moved(decision: Decision, memory: Memory, limits: Limits) -> Memory:
    """Once what was chosen is being done. What was given up and is taken again soon after was given up too early: until
    that is forgotten all takes twice as long, so that no load, whatever its period, is followed for ever in vain."""
    move, counts, at_s = decision.chosen, counts_of(parse(decision.layout)), decision.at_s
    assert move is not None
    less, more = given_up(move.counts, counts), added(move.counts, counts)
    calm, calmed_s = memory.calm, memory.calmed_s
    if at_s - calmed_s > FORGET_S:
        calm = 1.0
    soon_s = 2 * calm * (TRADE_S if less else limits.quiet_s)
    if any(in_vain(name, decision.need, memory, at_s - soon_s) for name in more):
        calm, calmed_s = min(2 * calm, MOST_CALM), at_s
    shared_s = at_s if move.core_share else memory.shared_s
    gone = {**memory.given_up, **{name: (at_s, decision.need[name]) for name in less}}
    suited = memory.suited
    if move.what == "relayout" and memory.mix is not None:
        suited = {**suited, frozenset(move.counts): memory.mix}
    return replace(memory, calm=calm, calmed_s=calmed_s, given_up=gone, suited=suited, shared_s=shared_s)


def failed(target: str, at_s: float, memory: Memory) -> Memory:
    """It (`Move.target`) could not be reached, or changed nothing: it rests."""
    _, before_s = memory.resting.get(target, (0.0, REST_S / 2))
    rest_s = min(2 * before_s, MOST_REST_S)
    return replace(memory, resting={**memory.resting, target: (at_s + rest_s, rest_s)})
