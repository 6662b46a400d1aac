"""`epd-bench transfer pd`: what of the P→D transfer a request sees, by mode of grouping, after EPD-Serve's Table 4.

Real: two vLLM processes on this machine's CPU, P and D, `bench` preset with random weights; bulk, layer by layer, fixed
groups and adaptive groups in turns on one launch per transport. Two cores that P, D and the link share cannot show what
overlap gains; they show packets, order and what is exposed.

`--device cuda`: the sender on a GPU's streams against layers of an 8B model's shape (`bench/micro/pd/one_gpu.py`). It
has not run on a GPU yet.

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

from bench.micro.measurement import Measurement, Row, Usually, one_of, several, whole
from bench.micro.pd import figures as pd
from bench.micro.pd import stages, timeline
from bench.micro.rows import figure_table
from bench.papers.kv_emulation import GOALS, run_emulation
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


def flags(parser: argparse.ArgumentParser) -> None:
    add, lengths = parser.add_argument, Usually((256, 512, 1024, 2048, 4096), quick=(256, 1024, 2048))
    add(
        "--lengths",
        type=several(whole(1, stages.LONGEST)),
        metavar="N,…",
        default=lengths,
        help="prompt tokens (default %(default)s)",
    )
    add(
        "--modes",
        type=several(str),
        default=MODES,
        help="of grouping, as --kv-grouping of epd-serve; ratios are to bulk",
    )
    add("--concurrency", type=several(whole(1, 64)), metavar="N,…", help="requests at a time (default 1,16, quick 1)")
    add("--transports", type=several(one_of(*stages.TRANSPORTS)), help="default all that are installed")
    add(
        "--rounds",
        type=whole(1, 1000),
        default=Usually(12, quick=4),
        help="of every mode, one request at a time (default %(default)s)",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the sender alone, on one GPU")
    parser.set_defaults(budget_s=Usually(86_400.0, quick=50.0))  # of asking one launch: no further round then


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of real requests, then of emulated ones; the last row has the figures of the emulation."""
    for mode in arguments.modes:
        parse_grouping(mode, 1)
    if arguments.device == "cuda":
        yield from _on_gpu(arguments)
        return
    installed, rounds = stages.available_transports(), arguments.rounds
    transports = arguments.transports or installed
    if missing := set(stages.TRANSPORTS) - set(installed):
        print(f"not installed: {', '.join(missing)}")
        if missing & set(transports):
            raise ConfigError(f"--transports: {', '.join(missing)} is not installed", param="--transports")
    concurrencies = arguments.concurrency or ((1,) if arguments.quick else (1, 16))
    of_each = {one: rounds if one == 1 else max(stages.LEAST_ROUNDS, rounds // 4) for one in concurrencies}
    for transport in transports:
        print(f"{transport}: starting {stages.LAYOUT}", flush=True)
        turns = stages.Turns(arguments.lengths, arguments.modes, of_each, arguments.budget_s)
        yield from stages.measure(transport, turns)
    emulated, rows, _ = _emulation(arguments.quick)
    yield from rows
    yield {"kind": "emulated figures", "quick": arguments.quick, "figures": emulated}


def _on_gpu(arguments: argparse.Namespace) -> Iterator[Row]:
    from bench.micro.pd import one_gpu  # imports torch

    for flag in ("transports", "concurrency"):
        if getattr(arguments, flag) is not None:
            raise ConfigError(f"--{flag} is for stages: leave it away with --device cuda", param=f"--{flag}")
    yield from one_gpu.measure_gpu(arguments.lengths, arguments.modes, arguments.rounds)


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
    if arguments.device == "cuda":
        from epd_serve.demo.decoder_layers import cuda_missing, device_name

        name = "no device" if cuda_missing() else device_name("cuda")
        return {"kind": f"real: compute and copies of {name}, layers of an 8B model, no vLLM"}
    real = f"real ({stages.LAYOUT}, two vLLM processes on CPU, {stages.PRESET} preset)"
    return {"kind": f"rows say which: {real} or emulated (virtual clock)"}


MEASUREMENT = Measurement(
    quick="fewer lengths and rounds, one request at a time",
    flags=flags,
    about=about,
    measure=measure,
    figures=figures,
    tables=tables,
    goals=GOALS,
    plot=timeline.draw,
)
add_arguments = MEASUREMENT.add_arguments
