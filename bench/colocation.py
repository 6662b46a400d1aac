"""`epd-bench colocation`: stages on one device against a monolith, and against fewer stages, on real stages.

The `bench` preset (random weights, an 8B model's proportions), one CPU. Layouts that are compared are up together and
take turns: a round sends the same requests, pictures and text, to each in a closed loop, in an order that changes from
round to round, and ratios are within a round. What the waiting ones use of the cores meanwhile is in the record. At
most two groups of five stages are started, one group after the other:

    TP1, (E-PD), and (E-PD) with core shares    on one virtual device, all cores
    EP-D, (E-P)-D                               on two

A text stream also decodes on (E-PD) alone, and while pictures storm E past the proxy, so that nothing of them has to be
prefilled. Before all that, the layouts of a group answer the same requests one at a time; tokens that differ fail the
measurement, but for shares: fewer threads add bfloat16 numbers up in another order, and random weights leave close
calls (against E-PD, which has as many threads, they are the same).

--engine sim runs the same flow on simulated stages, which compute on no cores and so have no shares: to try it, its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.colocation_figures import Versus, figures, layouts_table, ratio_table, storm_figures
from bench.colocation_group import Entry, Found, Plan, measure
from bench.colocation_mix import Mix
from bench.flow_process import FlowGenerator
from bench.record import add_arguments as add_record_arguments
from bench.record import busy, environment, write
from epd_serve.demo.presets import write_preset
from epd_serve.errors import ConfigError
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import read_properties

PRESET = "bench"
SHARES = "E=0.5,PD=0.5"
TP1, E_PD, E_PD_SHARES, EP_D, E_P_D = "TP1", "(E-PD)", f"(E-PD) {SHARES}", "EP-D", "(E-P)-D"
STAGE_BYTES = 2_500_000_000
"""Free memory per stage of the preset: its three processes, KV cache and share of the arena."""

CANNOT = """\
What cores of a CPU can show: that the outputs are the same (with shares up to rounding: fewer threads add bfloat16
numbers up in another order); what the split itself costs (more processes, an HTTP call and a copy of features and KV
per request); what two teams of threads take from each other on the same cores; and what is left of that when each has
cores of its own.
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


GROUPS = {
    "pd": (Entry(TP1, "TP1", 1), Entry(E_PD, "(E-PD)", 2), Entry(E_PD_SHARES, "(E-PD)", 2, ("--core-share", SHARES))),
    "d": (Entry(EP_D, "EP-D", 2), Entry(E_P_D, "(E-P)-D", 3)),
}
AGAINST = {
    "pd": (Versus("E_PD_over_TP1", E_PD, TP1), Versus("E_PD_with_core_share_over_TP1", E_PD_SHARES, TP1)),
    "d": (Versus("E_P_D_over_EP_D", E_P_D, EP_D),),
}


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print the tables and what they can show, write the record."""
    plan = plan_of(arguments)
    groups = {arguments.only: GROUPS[arguments.only]} if arguments.only else GROUPS
    if arguments.engine == "vllm":
        check_memory(max(sum(entry.stages for entry in group) for group in groups.values()))
    kind = "real" if arguments.engine == "vllm" else "simulated stages: to try the flow"
    env = environment(argv, kind, asked=arguments)
    found = Found()
    with tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch, FlowGenerator() as generator:
        flags = engine_flags(arguments, Path(scratch))
        for name, group in groups.items():
            if arguments.engine == "sim":
                group = tuple(replace(entry, flags=()) for entry in group)
            measure(found, generator, group, flags, plan, storms=name == "pd")
            names = {entry.name for entry in group}
            found.figures |= figures([one for one in found.rounds if one.name in names], AGAINST[name])
    found.figures |= storm_figures(found.storms, E_PD, E_PD_SHARES)
    mix = plan.mix
    print(
        f"\n{env['kind']}, {PRESET} preset, {mix.requests} requests a round ({mix.pictures} with a picture of "
        f"{mix.side} x {mix.side}), {mix.at_once} at once, {mix.answer} tokens each\n\n"
        f"{layouts_table(found.rounds)}\n\n{ratio_table(found.figures)}\n\n{CANNOT}\n{busy(env)}"
    )
    rows = [*(one.row() for one in found.rounds), *(one.row() for one in found.storms)]
    write(arguments.json, found.figures, env, rows)
    differ = [name for name in (E_PD, E_P_D) if found.figures.get(f"same_tokens/{name}", 1.0) < 1.0]
    if differ:
        print(f"\nNOT the same answers: {', '.join(differ)}", flush=True)
    return 1 if differ else 0


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
