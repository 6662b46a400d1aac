"""`epd-bench transfer pd`: what of the P→D transfer a request sees, by mode of grouping, after EPD-Serve's Table 4.

Real: two vLLM processes on this machine's CPU, P and D, `bench` preset with random weights; bulk, layer by layer, fixed
groups and adaptive groups in turns on one launch per transport. Two cores that P, D and the link share cannot show what
overlap gains; they show packets, order and what is exposed.

`--device cuda`: the sender on a GPU's streams against layers of an 8B model's shape (`bench/pd_cuda.py`). It has not
run on a GPU yet.

Emulated: the same policy on a fake device and link with a virtual clock, constants of one device from a sourced file
(`bench/pd_emulation.py`). It shows that the policy is right, and is no claim to be fast.

    exposed      max(0, DONE at D - end of prefill)
    KV latency   time of the transfer's packets on the link, summed
    overlap      1 - exposed / KV latency
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from bench import transfer_pd_figures as pd
from bench import transfer_pd_stages as stages
from bench.goals import goal_table
from bench.pd_emulation import GOALS, run_emulation
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from bench.timeline import check_plot, draw, typical
from bench.transfer_pd_figures import Cell, Sample
from deploy.placement_table import table
from epd_serve.errors import ConfigError
from epd_serve.kv.grouping import parse_grouping

MODES = "bulk,layerwise,fixed:2,fixed:4,fixed:8,adaptive"
LENGTHS, QUICK_LENGTHS = "256,512,1024,2048,4096", "256,1024,2048"
CONCURRENCY, QUICK_CONCURRENCY = "1,16", "1"
QUICK_S = 50.0  # of asking one launch: no further round is begun then
PLOTTED = 1024
REAL = f"real: {stages.LAYOUT}, two vLLM processes on CPU, {stages.PRESET} preset"
SHOWN = (
    "real_exposed_adaptive_over_bulk_1024",
    "real_packets_adaptive_1024",
    "real_overlap_1024_adaptive",
    "emu_overlap_1024_layerwise",
    "emu_overlap_1024_adaptive",
    "emu_overlap_2048_adaptive",
)
"""Figures without a goal that the command is quoted with; the real ones also with `_mooncake`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", metavar="N,…", help=f"prompt tokens (default {LENGTHS}, quick {QUICK_LENGTHS})")
    parser.add_argument("--modes", default=MODES, help="of grouping, as --kv-grouping of epd-serve; ratios are to bulk")
    parser.add_argument(
        "--concurrency", metavar="N,…", help=f"requests at a time (default {CONCURRENCY}, quick {QUICK_CONCURRENCY})"
    )
    parser.add_argument("--transports", help=f"of {','.join(stages.TRANSPORTS)} (default all that are installed)")
    parser.add_argument("--rounds", metavar="N", help="of every mode, one request at a time (default 12, quick 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the sender alone, on one GPU")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw one transfer per mode")
    add_record_arguments(parser, quick="fewer lengths and rounds, one request at a time")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, emulate, print the tables, write the result."""
    if arguments.plot is not None:
        check_plot(arguments.plot)
    modes = _modes(arguments.modes)
    turns = _turns(arguments, modes)
    if arguments.device == "cuda":
        return _run_on_gpu(arguments, argv, turns)
    kind = "rows say which: real (two vLLM processes on CPU) or emulated (virtual clock)"
    env = environment(argv, kind, asked=arguments)
    transports = _transports(arguments.transports)
    samples: list[Sample] = []
    for transport in transports:
        print(f"{transport}: starting {stages.LAYOUT}", flush=True)
        samples += stages.measure(transport, turns)
    found = pd.cells(samples, modes)
    for heading, cells in groupby(found, key=_heading):
        print(f"\n{heading}\n\n{table(pd.lines(cells))}", flush=True)
    figures, rows = pd.figures(found), [sample.row() for sample in samples]
    emulated, emulated_rows, tables = run_emulation(arguments.quick)
    print("\n" + "\n\n".join(tables))
    figures |= emulated
    print(f"\n{_shown(figures)}\n\n{goal_table(figures, GOALS)}")
    if arguments.plot is not None:
        _plot(arguments.plot, REAL, samples, modes)
    write(arguments.json, figures, env, [*rows, *emulated_rows])
    return 0


def _run_on_gpu(arguments: argparse.Namespace, argv: Sequence[str], turns: stages.Turns) -> int:
    from bench import pd_cuda  # imports torch

    for flag in ("transports", "concurrency"):
        if getattr(arguments, flag) is not None:
            raise ConfigError(f"--{flag} is for stages: leave it away with --device cuda", param=f"--{flag}")
    name = pd_cuda.gpu()
    env = environment(argv, kind=f"real: compute and copies of {name}, no vLLM", asked=arguments)
    samples = pd_cuda.measure_gpu(turns.lengths, turns.modes, turns.rounds[1])
    found = pd.cells(samples, turns.modes)
    for path, cells in groupby(found, key=lambda cell: cell.case.transport):
        print(f"\nreal: {name} to {path}, layers of an 8B model, no vLLM; medians (quartiles), ratios within a round\n")
        print(table(pd.lines(cells, "prefill and DONE")), flush=True)
    if arguments.plot is not None:
        _plot(arguments.plot, f"real: {name}, layers of an 8B model, no vLLM", samples, turns.modes)
    write(arguments.json, pd.figures(found, "cuda"), env, [sample.row() for sample in samples])
    return 0


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(dict.fromkeys(text.split(",")))
    for mode in modes:
        parse_grouping(mode, 1)
    return modes


def _transports(text: str | None) -> tuple[str, ...]:
    installed = stages.available_transports()
    if text is None:
        if len(installed) < len(stages.TRANSPORTS):
            print("Mooncake is not installed: shared memory only")
        return installed
    for transport in (transports := tuple(dict.fromkeys(text.split(",")))):
        if transport not in installed:
            known = transport in stages.TRANSPORTS
            reason = "is not installed" if known else f"is none of {', '.join(stages.TRANSPORTS)}"
            raise ConfigError(f"--transports: {transport!r} {reason}", param="--transports")
    return transports


def _turns(arguments: argparse.Namespace, modes: tuple[str, ...]) -> stages.Turns:
    quick = arguments.quick
    (rounds,) = _numbers("--rounds", arguments.rounds or ("4" if quick else "12"), 1000)
    lengths = _numbers("--lengths", arguments.lengths or (QUICK_LENGTHS if quick else LENGTHS), stages.LONGEST)
    together = _numbers("--concurrency", arguments.concurrency or (QUICK_CONCURRENCY if quick else CONCURRENCY), 64)
    return stages.Turns(
        lengths,
        modes,
        {number: rounds if number == 1 else max(stages.LEAST_ROUNDS, rounds // 4) for number in together},
        QUICK_S if quick else float("inf"),
    )


def _numbers(flag: str, text: str, most: int) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= most for word in words):
        raise ConfigError(f"{flag} {text}: numbers between 1 and {most}, separated by commas", param=flag)
    return tuple(dict.fromkeys(map(int, words)))


def _heading(cell: Cell) -> str:
    asked = f"{cell.case.transport}, {cell.case.together} at a time"
    return f"{REAL}, {asked}; medians (quartiles), ratios within a round"


def _shown(figures: Mapping[str, float]) -> str:
    """The figures that have no goal."""
    names = [name + suffix for name in SHOWN for suffix in ("", "_mooncake")]
    rows = [("figure", "found"), *((name, f"{figures[name]:.4g}") for name in names if name in figures)]
    return table(rows)


def _plot(path: Path, what: str, samples: Sequence[Sample], modes: Sequence[str]) -> None:
    """Of the first transport, one request at a time, 1024 tokens; or what was asked that is nearest to it."""
    first = min(samples, key=lambda sample: (sample.case.together, abs(sample.case.tokens - PLOTTED))).case
    own = [sample for sample in samples if sample.case == first]
    panels = [(mode, typical([one.transfer for one in own if one.mode == mode])) for mode in modes]
    draw(path, panels, f"{what}, {first.transport}, {first.tokens} tokens, {first.together} at a time")
