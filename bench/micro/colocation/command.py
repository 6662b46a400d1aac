"""`epd-bench colocation`: stages on one device against a monolith, and against fewer stages, on real stages.

The `bench` preset (random weights, an 8B model's proportions), one CPU. Layouts that are compared are up together and
take turns: a round sends the same requests, images and text, to each in a closed loop, in an order that changes from
round to round, and ratios are within a round. A round's throughput is its output tokens over the time from its first
request to its last answer; time per output token (TPOT) is (end - first byte) / (tokens - 1). What the waiting layouts
use of the cores meanwhile is in the result. At most two groups of five stages are started, one group after the other:

    TP1, (E-PD), and (E-PD) with core shares    on one virtual device, all cores
    EP-D, (E-P)-D                               on two

A text stream also decodes on (E-PD) alone, and while images storm E past the proxy, so that nothing of them has to be
prefilled. Before all that, the layouts of a group answer the same requests one at a time; tokens that differ fail the
measurement, but for shares: fewer threads add bfloat16 numbers up in another order, and random weights leave close
calls (against E-PD, which has as many threads, they are the same).

Cores of a CPU can show that the outputs are the same, what the split itself costs, what two teams of threads take from
each other on the same cores, and what is left of that when each has cores of its own. They cannot show the gain from
spatial multiplexing: an NPU has matrix and vector units, copy engines and links that idle while another stage uses
their neighbours; a CPU core is all of that at once. The paper's gains come from units that stood idle; here none do.

--engine sim runs the same flow on simulated stages, which compute on no cores and so have no shares: to try it, its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.clients.process import SenderProcess
from bench.clients.target import Target
from bench.micro.colocation.figures import E_P_D, E_PD, E_PD_SHARES, EP_D, SHARES, TP1, figures
from bench.micro.colocation.mix import Mix, storm, stream_body
from bench.micro.measurement import Goal, Measurement, Row, Usually, flag, in_turns, whole
from bench.real_stages import (
    add_engine_flags,
    check_memory,
    closed_loop,
    engine_flags,
    kind_of,
    seconds_of,
    tpot_s,
)
from bench.served import Served, scratch, served
from deploy.agent.cpu_time import cpu_seconds

ALIKE, ALONE_S = 4, 120.0
"""Requests whose answers are compared, token for token."""
STORM_CONCURRENCY = 4
STORM_LEAD_S = 1.0
"""A storm has lasted so long before the stream begins."""
STREAMS = 2
"""Answers of the decode stream, one after the other, of each half of a storm's round."""


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
SAME = tuple(Goal(f"same_tokens/{name}", "==", 1, "as the first layout's") for name in (E_PD, E_P_D))
FLAGS = {
    "--rounds": flag("rounds of each comparison", Usually(9, quick=3), whole()),
    "--requests": flag("of a round, two thirds with an image", Usually(24, quick=12), whole(2)),
    "--concurrency --at-once": flag("requests under way in a round", 6, whole()),
    "--answer": flag("tokens of an answer in a round", 32, whole(2)),
    "--only": flag("pd: the layouts without a D of its own; d: those with one", choices=tuple(GROUPS)),
}
SETTINGS = {"budget_s": Usually(360.0, quick=75.0)}
"""No further round of a kind then, once there are two."""


def mix_of(arguments: argparse.Namespace) -> Mix:
    images = round(arguments.requests * 2 / 3)
    return Mix(arguments.requests, images, arguments.concurrency, arguments.answer)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of equal answers, of rounds, and of streams in a storm."""
    groups = [GROUPS[name] for name in ([arguments.only] if arguments.only else GROUPS)]
    real, mix = arguments.engine == "vllm", mix_of(arguments)
    if real:
        check_memory(max(sum(entry.stages for entry in group) for group in groups))
    with scratch() as folder, SenderProcess() as sender:
        common = engine_flags(arguments, folder)
        for group in groups:
            with contextlib.ExitStack() as stack:
                launches: list[Served] = []
                for entry in group:
                    own = entry.flags if real else ()
                    context = served(entry.layout, (*common, *own), name=entry.name, traced=False)
                    launches.append(stack.enter_context(context))
                    print(f"{entry.name}: ready in {launches[-1].ready_s:.0f} s", flush=True)
                yield from same_tokens(launches, mix)
                for launch in launches:
                    play(sender, launch, launches, mix, seed=1000, turn=-1)  # kernels, connections, first-time imports
                names, budget_s = ", ".join(one.name for one in launches), arguments.budget_s
                for turn, launch in in_turns(launches, arguments.rounds, budget_s, names):
                    yield play(sender, launch, launches, mix, turn, turn)
                colocated = [one for one in launches if one.stage_url("E") and group is GROUPS["pd"]]
                for turn, launch in in_turns(colocated, arguments.rounds, budget_s, "in a storm" * bool(colocated)):
                    yield in_a_storm(sender, launch, mix, turn)


def same_tokens(launches: Sequence[Served], mix: Mix) -> Iterator[Row]:
    """The share of some requests, asked one at a time, that each layout answers as the first one."""
    bodies = mix.bodies(launches[0].model, seed=2000)
    chosen = [*bodies[: ALIKE // 2], *bodies[-ALIKE // 2 :]]
    first, *others = ([Target(one.url).token_ids(body, ALONE_S) for body in chosen] for one in launches)
    for launch, answers in zip(launches[1:], others, strict=True):
        share = float(np.mean([own == base for own, base in zip(answers, first, strict=True)]))
        yield {"layout": launch.name, "same_tokens": share, "requests": len(chosen)}


def play(sender: SenderProcess, launch: Served, launches: Sequence[Served], mix: Mix, seed: int, turn: int) -> Row:
    """A round of one layout: the mix of `seed`. `others_cpu_s`: of the other layouts, which nobody asked anything.

    Raises:
        StageError: an answer was not good; compared are only complete rounds.
    """
    before = {one.name: sum(cpu_seconds(one.cpu_parts).values()) for one in launches}
    records = closed_loop(sender, launch.url, mix.bodies(launch.model, seed), mix.concurrency)
    spent = {one.name: sum(cpu_seconds(one.cpu_parts).values()) - before[one.name] for one in launches}
    own_cpu_s, seconds = spent.pop(launch.name), seconds_of(records)
    return {
        "layout": launch.name,
        "round": turn,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(mix.answer * len(records) / seconds, 3),
        "ttft_ms": [round(one.wait_s() * 1e3, 2) for one in records],
        "tpot_ms": [round(tpot_s(one, mix.answer) * 1e3, 3) for one in records],
        "cpu_s": round(own_cpu_s, 3),
        "others_cpu_s": round(sum(spent.values()), 3),
    }


def in_a_storm(sender: SenderProcess, launch: Served, mix: Mix, turn: int) -> Row:
    """A layout's stream alone and under a storm; which comes first changes from round to round."""
    encoder = launch.stage_url("E")
    assert encoder is not None
    answer, streams = 2 * mix.answer, itertools.count(2 * turn * STREAMS)

    def stream_ms() -> float:
        bodies = [stream_body(launch.model, -1 - next(streams), mix.prompt, answer) for _ in range(STREAMS)]
        records = closed_loop(sender, launch.url, bodies, 1)
        return round(float(np.mean([tpot_s(one, answer) for one in records])) * 1e3, 3)

    solo_ms = stream_ms() if turn % 2 == 0 else None
    with storm(encoder, launch.model, side=mix.side, concurrency=STORM_CONCURRENCY) as run:
        time.sleep(STORM_LEAD_S)
        storm_ms = stream_ms()
    return {
        "layout": launch.name,
        "round": turn,
        "storm": True,
        "solo_tpot_ms": stream_ms() if solo_ms is None else solo_ms,
        "storm_tpot_ms": storm_ms,
        "encodes_per_s": round(sum(one.ok for one in run.rows) / (run.ended_s - run.begun_s), 3),
    }


MEASUREMENT = Measurement(
    quick="3 rounds of 12 requests, within 8 minutes",
    flags=FLAGS,
    add_flags=add_engine_flags,
    settings=SETTINGS,
    about=kind_of,
    measure=measure,
    figures=figures,
    required=SAME,
)
add_arguments = MEASUREMENT.add_arguments
