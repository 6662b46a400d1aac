"""`epd-bench transfer pd`: what of the P→D transfer a request sees, by mode of grouping, after EPD-Serve's Table 4.

Real: two vLLM processes, P and D, on this machine's CPU or sharing its cards (`--device`), random weights; bulk, layer
by layer, fixed groups and adaptive groups in turns on one launch per transport. Two cores that P, D and the link share
cannot show what overlap gains; they show packets, order and what is exposed. It has not run on a card yet.

    exposed      max(0, DONE at D - end of prefill); of requests at one time, of the one that waits longest
    KV latency   time of the transfer's packets on the link, summed; a packet that several requests share counts once
    overlap      1 - exposed / KV latency
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from bench.micro.measurement import (
    LEAST_ROUNDS,
    Measurement,
    Row,
    Usually,
    flag,
    one_of,
    several,
    whole,
)
from bench.micro.pd import stages
from bench.micro.pd.figures import figures
from epd_serve.demo.presets import PRESETS
from epd_serve.errors import ConfigError
from epd_serve.kv.grouping import parse_grouping

MODES = ("bulk", "layerwise", "fixed:2", "fixed:4", "fixed:8", "adaptive")

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
    """Rows of requests, transport by transport."""
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


def about(arguments: argparse.Namespace) -> dict[str, str]:
    return {"kind": f"real ({stages.LAYOUT}, two vLLM processes on {arguments.device}, {arguments.preset} preset)"}


MEASUREMENT = Measurement(
    quick="fewer lengths and rounds, one request at a time",
    flags=FLAGS,
    settings=SETTINGS,
    about=about,
    measure=measure,
    figures=figures,
)
add_arguments = MEASUREMENT.add_arguments
