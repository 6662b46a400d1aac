"""`epd-bench colocation`: stages on one device against a monolith, and against fewer stages, on real stages.

The `bench` preset (random weights, an 8B model's proportions), one CPU. Layouts that are compared are up together and
take turns: a round sends the same requests, pictures and text, to each in a closed loop, in an order that changes from
round to round, and ratios are within a round. What the waiting ones use of the cores meanwhile is in the record. At
most two groups of five stages are started, one group after the other:

    TP1, (E-PD), and (E-PD) with core shares    on one virtual device, all cores
    EP-D, (E-P)-D                               on two

In between a text stream decodes on (E-PD) alone, and while pictures storm E past the proxy, so that nothing of them
has to be prefilled. Before all that, every layout of a group answers the same requests one at a time, token for token.

--engine sim runs the same flow on simulated stages, which compute on no cores and so have no shares: to try it, its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from bench.colocation_figures import StormRound, Versus, figures, layouts_table, ratio_table, storm_figures
from bench.colocation_mix import Contestant, Mix, Round, play, round_of, tokens_of
from bench.flow_process import FlowGenerator
from bench.flows import Flow
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from bench.scenario_bodies import text
from bench.served import served
from bench.storm import Storm
from epd_serve.demo.presets import write_preset
from epd_serve.errors import ConfigError, StageError
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import read_properties

PRESET = "bench"
SHARES = "E=0.5,PD=0.5"
TP1, E_PD, E_PD_SHARES, EP_D, E_P_D = "TP1", "(E-PD)", f"(E-PD) {SHARES}", "EP-D", "(E-P)-D"
ALIKE = 4
"""Requests whose answers are compared, token for token."""

STORM_AT_ONCE = 4
STORM_LEAD_S = 1.0
"""A storm has lasted so long before the stream begins."""

STREAMS = 2
"""Answers of the decode stream, one after the other, of each half of a storm's round."""

LEAST_ROUNDS = 2
STAGE_BYTES = 2_500_000_000
"""Free memory per stage of the preset: its three processes, KV cache and share of the arena."""

CANNOT = """\
What cores of a CPU can show: the outputs are the same; how much the split itself costs (more processes, an HTTP call
and a copy of features and KV per request); that decode steps no longer wait for a whole picture to be encoded in
front of them, because the kernel takes turns in milliseconds where a monolith's step takes as long as its picture; and
that cores of its own keep a decode stream as it was, at the price of the other half.
What they cannot: the gain from spatial multiplexing. An NPU has matrix and vector units, copy engines and links that
idle while another stage uses their neighbours; a CPU core is all of that at once, so stages on the same cores take
turns, and the work that a split adds is taken from both. The paper's throughput gains come from units that stood idle;
here none do. With two cores, (E-P)-D has one core for E and P together, as EP-D has for EP, and a share is a core or
nothing. Small shares, more than one neighbour, and HBM bandwidth are for the card."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (default 9, quick 3)")
    parser.add_argument(
        "--requests", type=int, help="requests of a round, two thirds with a picture (default 24, quick 12)"
    )
    parser.add_argument("--at-once", type=int, default=6, help="requests under way in a round")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer in a round")
    parser.add_argument(
        "--engine", choices=("vllm", "sim"), default="vllm", help="sim: to try the flow, no measurement"
    )
    parser.add_argument("--sim-profile", help="with --engine sim: the profile of the simulated stages")
    parser.add_argument("--only", choices=("pd", "d"), help="pd: the layouts without a D of its own; d: those with one")
    add_record_arguments(parser, quick="3 rounds of 12 requests, within 8 minutes")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Entry:
    """A layout to start: what it is called, and its flags."""

    name: str
    layout: str
    stages: int
    flags: tuple[str, ...] = ()


GROUPS = {
    "pd": (Entry(TP1, "TP1", 1), Entry(E_PD, "(E-PD)", 2), Entry(E_PD_SHARES, "(E-PD)", 2, ("--core-share", SHARES))),
    "d": (Entry(EP_D, "EP-D", 2), Entry(E_P_D, "(E-P)-D", 3)),
}
AGAINST = {
    "pd": (Versus("E_PD_over_TP1", E_PD, TP1), Versus("E_PD_with_core_share_over_TP1", E_PD_SHARES, TP1)),
    "d": (Versus("E_P_D_over_EP_D", E_P_D, EP_D),),
}


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


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print the tables and what they can show, write the record."""
    plan = plan_of(arguments)
    groups = {arguments.only: GROUPS[arguments.only]} if arguments.only else GROUPS
    if arguments.engine == "vllm":
        check_memory(max(sum(entry.stages for entry in group) for group in groups.values()))
    env = environment(argv, "real" if arguments.engine == "vllm" else "simulated stages: to try the flow")
    found = Found()
    with tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch, FlowGenerator() as generator:
        flags = engine_flags(arguments, Path(scratch))
        for name, group in groups.items():
            if arguments.engine == "sim":
                group = tuple(replace(entry, flags=()) for entry in group)
            _group(found, generator, group, flags, plan, storms=name == "pd")
            found.figures |= figures([one for one in found.rounds if one.name in _names(group)], AGAINST[name])
    found.figures |= storm_figures(found.storms, E_PD, E_PD_SHARES)
    mix = plan.mix
    print(
        f"\n{env['kind']}, {PRESET} preset, {mix.requests} requests a round ({mix.pictures} with a picture of "
        f"{mix.side} x {mix.side}), {mix.at_once} at once, {mix.answer} tokens each\n\n"
        f"{layouts_table(found.rounds)}\n\n{ratio_table(found.figures)}\n\n{CANNOT}"
    )
    rows = [*(one.row() for one in found.rounds), *(one.row() for one in found.storms)]
    write(arguments.json, found.figures, env, rows)
    return 0


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Raises ConfigError for numbers that measure nothing."""
    quick = arguments.quick
    rounds = (3 if quick else 9) if arguments.rounds is None else arguments.rounds
    requests = (12 if quick else 24) if arguments.requests is None else arguments.requests
    for flag, value, least in (
        ("--rounds", rounds, 1),
        ("--requests", requests, 2),
        ("--at-once", arguments.at_once, 1),
        ("--answer", arguments.answer, 2),
    ):
        if value < least:
            raise ConfigError(f"{flag} {value}: at least {least}", param=flag)
    mix = Mix(requests, round(requests * 2 / 3), arguments.at_once, arguments.answer)
    return Plan(mix, rounds, 75.0 if quick else 360.0, stream_answer=2 * arguments.answer)


def check_memory(stages: int) -> None:
    """Raises ConfigError where the largest group does not fit into what is free."""
    free = read_properties(DeviceInventory("cpu"))[0].free_bytes
    if free is not None and free < stages * STAGE_BYTES:
        raise ConfigError(
            f"{stages} stages are up at a time, which takes {stages * STAGE_BYTES / 1e9:.0f} GB of memory, and "
            f"{free / 1e9:.0f} are free: end something, or measure a part with --only",
            param="--only",
        )


def engine_flags(arguments: argparse.Namespace, scratch: Path) -> tuple[str, ...]:
    """What every launch gets: the model, or the simulation."""
    if arguments.engine == "sim":
        return ("--engine", "sim", *(("--sim-profile", arguments.sim_profile) if arguments.sim_profile else ()))
    write_preset(scratch / PRESET, PRESET)
    return (str(scratch / PRESET),)


def _names(group: Sequence[Entry]) -> set[str]:
    return {entry.name for entry in group}


def _group(
    found: Found, generator: FlowGenerator, group: Sequence[Entry], flags: tuple[str, ...], plan: Plan, *, storms: bool
) -> None:
    """Start a group, check it, measure it, end it."""
    with contextlib.ExitStack() as stack:
        who = []
        for entry in group:
            launch = stack.enter_context(served(entry.layout, (*flags, *entry.flags), name=entry.name, traced=False))
            print(f"{entry.name}: ready in {launch.ready_s:.0f} s", flush=True)
            who.append(Contestant(entry.name, launch))
        _check_alike(who, plan.mix)
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


def _check_alike(who: Sequence[Contestant], mix: Mix) -> None:
    """Greedy answers, asked for one at a time, are those of the first layout. Raises StageError where not."""
    bodies = mix.bodies(who[0].launch.model, seed=2000)
    chosen = [*bodies[: ALIKE // 2], *bodies[-ALIKE // 2 :]]
    with httpx.Client(timeout=120, trust_env=False) as client:
        expected = [tokens_of(client, who[0], body, mix.answer) for body in chosen]
        for one in who[1:]:
            answers = [tokens_of(client, one, body, mix.answer) for body in chosen]
            if answers != expected:
                raise StageError(f"{one.name} answers other tokens than {who[0].name}", stage=one.name)
    print(f"{', '.join(one.name for one in who)}: the same tokens for {len(chosen)} requests", flush=True)


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
        | {"ignore_eos": True}
        for number in range(seed * STREAMS, (seed + 1) * STREAMS)
    ]
    run = generator.run(who.launch.url, [Flow("stream", bodies, at_once=1, count=STREAMS)], limit_s=120.0)
    return statistics.fmean(round_of(who.name, 0, run.outcomes, plan.stream_answer).tpot_s)
