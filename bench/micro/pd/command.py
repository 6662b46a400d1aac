"""`epd-bench transfer pd`: what of the P→D transfer a request sees, by mode of grouping, after EPD-Serve's Table 4.

Real: two vLLM processes, P and D, on this machine's CPU or sharing its cards (`--device`), random weights; bulk, layer
by layer, fixed groups and adaptive groups in turns on one launch per transport. Two cores that P, D and the link share
cannot show what overlap gains; they show packets, order and what is exposed. It has not run on a card yet.

    exposed      max(0, DONE at D - end of prefill); of requests at one time, of the one that waits longest
    KV latency   time of the transfer's packets on the link, summed; a packet that several requests share counts once
    overlap      1 - exposed / KV latency

The chart has P's compute and the packets of a transfer as bars, one panel per mode. Colours are Okabe and Ito's, which
colour-blind people tell apart; what is exposed is hatched as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from bench.micro.measurement import (
    BLUE,
    LEAST_ROUNDS,
    ORANGE,
    SKY,
    VERMILLION,
    Measurement,
    Row,
    Usually,
    chart,
    flag,
    one_of,
    several,
    whole,
)
from bench.micro.pd import stages
from bench.micro.pd.figures import cell_table, cells, figures
from bench.micro.rows import figure_table, grouped, median
from epd_serve.demo.presets import PRESETS
from epd_serve.errors import ConfigError
from epd_serve.kv.grouping import parse_grouping

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPUTE_AT, LINK_AT, BAR = 1.0, 0.0, 0.72  # where the two rows of bars lie, and how high a bar is
PLOTTED = 1024


def typical(rows: Sequence[Row]) -> Row:
    """The row whose exposed time is nearest to the median of all."""
    middle = median(rows, "exposed_ms")
    return min(rows, key=lambda row: abs(row["exposed_ms"] - middle))


def draw(path: Path, rows: Sequence[Row], heading: str) -> None:
    """A panel per mode, all on one time axis: of the first transport, with the least concurrency, at 1024 tokens; or
    what was measured that is nearest to that."""
    real = [row for row in rows if row["kind"] == "real"]
    first = min(real, key=lambda row: (row["concurrency"], abs(row["tokens"] - PLOTTED)))
    case = ("transport", "tokens", "concurrency")
    own = grouped((row for row in real if all(row[name] == first[name] for name in case)), "mode")
    what = "{}, {} tokens, concurrency {}".format(*(first[name] for name in case))
    with chart(path, 11, 1.3 + 1.25 * len(own), f"{heading}: {what}") as figure:
        axes = figure.subplots(len(own), 1, sharex=True, squeeze=False)[:, 0]
        for ax, ((mode,), of_mode) in zip(axes, own.items(), strict=True):
            _panel(ax, mode, typical(of_mode))
        axes[0].legend(ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.22), frameon=False, fontsize=8)
        axes[-1].set_xlabel("time since P began to compute the prompt (ms)")


def _panel(ax: Axes, mode: str, row: Row) -> None:
    line = row["timeline_ms"]
    layers = [(begun, ended) for step in line["steps"] for begun, ended in pairwise(step[:-1])]
    bars = (
        (layers, COMPUTE_AT, BLUE, "white", "a layer of P, until its KV is written"),
        ([step[-2:] for step in line["steps"]], COMPUTE_AT, SKY, "white", "rest of the step"),
        # With an edge of its own colour a packet is seen however short it is.
        ([packet[:2] for packet in line["packets"]], LINK_AT, ORANGE, ORANGE, "a packet on the link"),
    )
    for spans, at, colour, edge, label in bars:
        widths = [(begun, ended - begun) for begun, ended in spans]
        ax.broken_barh(widths, (at - BAR / 2, BAR), facecolors=colour, edgecolors=edge, linewidth=0.8, label=label)
    ax.broken_barh(
        [(line["prefill_end"], row["exposed_ms"])],
        (LINK_AT - BAR / 2, 1 + BAR),
        facecolors="none",
        edgecolors=VERMILLION,
        hatch="///",
        linewidth=0.0,
        label="exposed",
    )
    ax.axvline(line["prefill_end"], color="black", linestyle="--", linewidth=1.0, label="end of prefill")
    ax.axvline(line["done"], color=VERMILLION, linewidth=1.2, label="DONE at D")
    ax.set_yticks([COMPUTE_AT, LINK_AT], ["P computes", "link"])
    ax.set_ylim(LINK_AT - 0.5, COMPUTE_AT + 0.5)
    title = f"{mode}: packets {row['packets']}, exposed {row['exposed_ms']:.1f} ms, overlap {row['overlap']:.0%}"
    ax.set_title(title, fontsize=9, loc="left")


MODES = ("bulk", "layerwise", "fixed:2", "fixed:4", "fixed:8", "adaptive")
SHOWN = (
    *(f"real_{name}_adaptive_over_bulk_1024" for name in ("exposed", "ttft")),
    *(f"real_{name}_adaptive_1024" for name in ("packets", "exposed_ms")),
    "real_overlap_1024_adaptive",
)
"""Figures without a goal that the command is quoted with; also with `_mooncake`."""

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


def tables(rows: Sequence[Row]) -> Iterable[str]:
    yield cell_table(cells(rows))
    yield figure_table(figures(rows), [name + suffix for name in SHOWN for suffix in ("", "_mooncake")])


def about(arguments: argparse.Namespace) -> dict[str, str]:
    return {"kind": f"real ({stages.LAYOUT}, two vLLM processes on {arguments.device}, {arguments.preset} preset)"}


MEASUREMENT = Measurement(
    quick="fewer lengths and rounds, one request at a time",
    flags=FLAGS,
    settings=SETTINGS,
    about=about,
    measure=measure,
    figures=figures,
    tables=tables,
    plot=draw,
)
add_arguments = MEASUREMENT.add_arguments
