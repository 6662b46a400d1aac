"""A group of layouts, up together and measured in turns: the measuring of `epd-bench colocation`.

Owns the order of things: start, compare answers, warm up, rounds, storms. What is sent and what a round is, is
`bench/colocation_mix.py`'s; which layouts there are, the command's.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.colocation_figures import StormRound
from bench.colocation_mix import EVERY_TOKEN, Contestant, Mix, Round, play, round_of, tokens_of
from bench.flow_process import FlowGenerator
from bench.flows import Flow
from bench.scenario_bodies import text
from bench.served import served
from bench.storm import Storm

ALIKE = 4
"""Requests whose answers are compared, token for token."""

STORM_AT_ONCE = 4
STORM_LEAD_S = 1.0
"""A storm has lasted so long before the stream begins."""

STREAMS = 2
"""Answers of the decode stream, one after the other, of each half of a storm's round."""

LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Entry:
    """A layout to start: what it is called, and its flags."""

    name: str
    layout: str
    stages: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How much is measured. `budget_s`: no further round of a kind begins after so long, once there are two."""

    mix: Mix
    rounds: int
    budget_s: float
    stream_answer: int


@dataclass
class Found:
    """What the groups have left so far."""

    rounds: list[Round] = field(default_factory=list)
    storms: list[StormRound] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def measure(
    found: Found, generator: FlowGenerator, group: Sequence[Entry], flags: tuple[str, ...], plan: Plan, *, storms: bool
) -> None:
    """Start a group, check it, measure it, end it."""
    with contextlib.ExitStack() as stack:
        who = []
        for entry in group:
            launch = stack.enter_context(served(entry.layout, (*flags, *entry.flags), name=entry.name, traced=False))
            print(f"{entry.name}: ready in {launch.ready_s:.0f} s", flush=True)
            who.append(Contestant(entry.name, launch))
        found.figures |= _same_tokens(who, plan.mix)
        for one in who:
            play(generator, one, who, plan.mix, seed=1000, turn=-1)  # kernels, connections, first-time imports
        _until(plan, "rounds", lambda turn: found.rounds.extend(_round(generator, who, plan.mix, turn)))
        if storms:
            co_located = [one for one in who if one.launch.stage_url("E")]
            _until(plan, "storms", lambda turn: found.storms.extend(_storms(generator, co_located, plan, turn)))


def _until(plan: Plan, what: str, measure: Callable[[int], None]) -> None:
    """All rounds of a kind, or those that fit into the budget."""
    begun = time.monotonic()
    for turn in range(plan.rounds):
        if turn >= LEAST_ROUNDS and time.monotonic() - begun > plan.budget_s:
            print(f"a slow or busy machine: {turn} rounds of {what} instead of {plan.rounds}", flush=True)
            break
        measure(turn)
    took_s = time.monotonic() - begun
    print(f"{what}: {took_s:.0f} s (load {os.getloadavg()[0]:.1f})", flush=True)


def _same_tokens(who: Sequence[Contestant], mix: Mix) -> dict[str, float]:
    """`same_tokens/LAYOUT`: the share of some requests, asked one at a time, that it answers as the first one."""
    bodies = mix.bodies(who[0].launch.model, seed=2000)
    chosen = [*bodies[: ALIKE // 2], *bodies[-ALIKE // 2 :]]
    with httpx.Client(timeout=120, trust_env=False) as client:
        answers = [[tokens_of(client, one, body, mix.answer) for body in chosen] for one in who]
    same = {
        one.name: statistics.fmean(own == first for own, first in zip(given, answers[0], strict=True))
        for one, given in zip(who[1:], answers[1:], strict=True)
    }
    for name, share in same.items():
        print(f"{name}: {share:.0%} of {len(chosen)} answers token for token those of {who[0].name}", flush=True)
    return {f"same_tokens/{name}": share for name, share in same.items()}


def _round(generator: FlowGenerator, who: Sequence[Contestant], mix: Mix, turn: int) -> list[Round]:
    order = random.Random(turn).sample(list(who), len(who))
    return [play(generator, one, who, mix, seed=turn, turn=turn) for one in order]


def _storms(generator: FlowGenerator, who: Sequence[Contestant], plan: Plan, turn: int) -> list[StormRound]:
    """Each layout's stream alone and under a storm; which comes first changes from round to round."""
    found = []
    for one in random.Random(turn).sample(list(who), len(who)):
        encoder = one.launch.stage_url("E")
        assert encoder is not None
        solo_s = _stream(generator, one, plan, 2 * turn) if turn % 2 == 0 else 0.0
        with Storm(encoder, one.launch.model, side=plan.mix.side, at_once=STORM_AT_ONCE) as storm:
            time.sleep(STORM_LEAD_S)
            storm_s = _stream(generator, one, plan, 2 * turn + 1)
        solo_s = solo_s or _stream(generator, one, plan, 2 * turn)
        found.append(StormRound(one.name, turn, solo_s, storm_s, storm.per_second))
    return found


def _stream(generator: FlowGenerator, who: Contestant, plan: Plan, seed: int) -> float:
    """Mean TPOT of a few text answers, one after the other."""
    bodies: list[dict[str, Any]] = [
        text(who.launch.model, tokens=plan.mix.prompt, answer=plan.stream_answer, stream=True, seed=-1 - number)
        | EVERY_TOKEN
        for number in range(seed * STREAMS, (seed + 1) * STREAMS)
    ]
    run = generator.run(who.launch.url, [Flow("stream", bodies, at_once=1, count=STREAMS)], limit_s=120.0)
    return statistics.fmean(round_of(who.name, 0, run.outcomes, plan.stream_answer).tpot_s)
