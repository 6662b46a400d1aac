"""`epd-bench transfer pd`: what of the P→D transfer a request sees, by mode of grouping, after EPD-Serve's Table 4.

Real: two vLLM processes, P and D, on this machine's CPU or sharing its cards (`--device`), random weights; bulk, layer
by layer, fixed groups and adaptive groups in turns on one launch per transport. Two cores that P, D and the link share
cannot show what overlap gains; they show packets, order and what is exposed. It has not run on a card yet.

Emulated: the same policy on a fake device and link with a virtual clock, constants of one device from a sourced file
(`bench/papers/kv_emulation.py`). It shows that the policy is right, and is no claim to be fast.

    exposed      max(0, DONE at D - end of prefill); of requests at one time, of the one that waits longest
    KV latency   time of the transfer's packets on the link, summed; a packet that several requests share counts once
    overlap      1 - exposed / KV latency
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Iterator, Sequence

from bench.micro.measurement import LEAST_ROUNDS, Measurement, Row, Usually, flag, one_of, several, whole
from bench.micro.pd import figures as pd
from bench.micro.pd import stages, timeline
from bench.micro.rows import figure_table
from bench.papers.kv_emulation import GOALS, run_emulation
from epd_serve.demo.presets import PRESETS
from epd_serve.errors import ConfigError
from epd_serve.kv.grouping import parse_grouping

MODES = ("bulk", "layerwise", "fixed:2", "fixed:4", "fixed:8", "adaptive")
SHOWN = (
    *(f"real_{name}_adaptive_over_bulk_1024" for name in ("exposed", "ttft")),
    *(f"real_{name}_adaptive_1024" for name in ("packets", "exposed_ms")),
    "real_overlap_1024_adaptive",
)
"""Figures without a goal that the command is quoted with; also with `_mooncake`."""

_emulation = functools.cache(run_emulation)
FLAGS = {
    "--lengths": flag(
        "prompt tokens",
        Usually((256, 512, 1024, 2048, 4096), quick=(256, 1024, 2048)),
        several(whole(1, stages.LONGEST)),
        metavar="N,…",
    ),
    "--modes": flag("of grouping, as --kv-grouping of epd-serve; ratios are to bulk", MODES, several(str)),
    "--concurrency": flag("requests at a time", Usually((1, 16), quick=(1,)), several(whole(1, 64)), metavar="N,…"),
    "--transports": flag("default all that are installed", type=several(one_of(*stages.TRANSPORTS))),
    "--rounds": flag("of every mode, one request at a time", Usually(12, quick=4), whole(1, 1000)),
    "--device": flag("of both stages", "cpu", choices=("cpu", "cuda", "npu")),
    "--preset": flag("the model; 8b for a card", "bench", choices=PRESETS),
}
SETTINGS = {"budget_s": Usually(86_400.0, quick=50.0)}
"""Of asking one launch: no further round then."""


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of real requests, then of emulated ones; the last row has the figures of the emulation."""
    for mode in arguments.modes:
        parse_grouping(mode, 1)
    installed, rounds = stages.available_transports(), arguments.rounds
    transports = arguments.transports or installed
    if missing := ", ".join(sorted(set(stages.TRANSPORTS) - set(installed))):
        print(f"not installed: {missing}")
        if set(transports) - set(installed):
            raise ConfigError(f"--transports: {missing} is not installed", param="--transports")
    of_each = {one: rounds if one == 1 else max(LEAST_ROUNDS, rounds // 4) for one in arguments.concurrency}
    turns = stages.Turns(arguments.lengths, arguments.modes, of_each, arguments.budget_s)
    for transport in transports:
        print(f"{transport}: starting {stages.LAYOUT}", flush=True)
        yield from stages.measure(transport, turns, arguments.device, arguments.preset)
    emulated, rows, _ = _emulation(arguments.quick)
    yield from rows
    yield {"kind": "emulated figures", "quick": arguments.quick, "figures": emulated}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    emulated = [row["figures"] for row in rows if row["kind"] == "emulated figures"]
    return pd.figures(rows) | (emulated[0] if emulated else {})


def tables(rows: Sequence[Row]) -> Iterable[str]:
    yield pd.cell_table(pd.cells(rows))
    for row in rows:
        if row["kind"] == "emulated figures":
            yield from _emulation(row["quick"])[2]
    yield figure_table(figures(rows), [name + suffix for name in SHOWN for suffix in ("", "_mooncake")])


def about(arguments: argparse.Namespace) -> dict[str, str]:
    real = f"real ({stages.LAYOUT}, two vLLM processes on {arguments.device}, {arguments.preset} preset)"
    return {"kind": f"rows say which: {real} or emulated (virtual clock)"}


MEASUREMENT = Measurement(
    quick="fewer lengths and rounds, one request at a time",
    flags=FLAGS,
    settings=SETTINGS,
    about=about,
    measure=measure,
    figures=figures,
    tables=tables,
    goals=GOALS,
    plot=timeline.draw,
)
add_arguments = MEASUREMENT.add_arguments
