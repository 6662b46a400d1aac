"""`epd-bench batches`: throughput and latency of each stage alone against its batch size.

As HydraInfer v1 Fig. 6 (v2 Fig. 3). E-PD is served and its stages are asked past the proxy, one stage at a time, with
so many requests under way:

    encode     images of --side pixels, each new to the encoder       pictures/s, and ms per picture
    prefill    prompts of --prompt tokens, one token of answer        prompt tokens/s, and ms per prompt
    decode     short prompts, --answer tokens each                    output tokens/s, and ms between tokens

The batch is what the scheduler makes of the requests under way: it may split them into several steps. Decode's
throughput is the sum of the answers' own rates, after their first tokens. A stage is saturated at the least batch size
that has 90 % of its best throughput, unless that is the largest one measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.clients.process import SenderProcess
from bench.clients.records import RequestRecord
from bench.micro.charts import BLUE, VERMILLION, chart
from bench.micro.colocation.mix import encode_body, stream_body
from bench.micro.measurement import Measurement, Row, Usually, flag, one_of, several, whole
from bench.micro.rows import grouped, table_of
from bench.real_stages import (
    add_engine_flags,
    check_memory,
    closed_loop,
    engine_flags,
    kind_of,
    seconds_of,
    tpot_s,
)
from bench.scratch import scratch
from bench.served import served
from bench.workloads.synthetic import demo_image, text_body
from epd_serve.errors import StageError

LAYOUT = "E-PD"
STAGES = {"encode": "E", "prefill": "PD", "decode": "PD"}
UNITS = {
    "encode": ("pictures/s", "ms per picture"),
    "prefill": ("prompt tokens/s", "ms per prompt"),
    "decode": ("output tokens/s", "ms between tokens"),
}
LEAST, MOST = 4, 512
"""Requests of a point, and the largest batch."""
SHORT_PROMPT = 32
SATURATED = 0.9
"""Of a stage's best throughput."""


FLAGS = {
    "--sizes": flag(
        "requests under way", Usually((1, 2, 4, 8, 16), quick=(1, 2, 4)), several(whole(1, MOST)), metavar="N,…"
    ),
    "--stages": flag("which are measured", tuple(STAGES), several(one_of(*STAGES))),
    "--prompt": flag("tokens of a prompt of prefill", 1024, whole()),
    "--answer": flag("tokens of an answer of decode", 32, whole(2)),
    "--side": flag("of an image, in pixels", 336, whole(28)),
}
SETTINGS = {"turns": Usually(4, quick=2)}
"""Requests of a point over its batch size."""


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    if arguments.engine == "vllm":
        check_memory(2)
    with scratch() as folder, SenderProcess() as sender:
        with served(LAYOUT, engine_flags(arguments, folder), traced=False) as launch:
            print(f"{LAYOUT}: ready in {launch.ready_s:.0f} s", flush=True)
            for stage in arguments.stages:
                url, bodies = launch.stage_url(STAGES[stage]), bodies_of(stage, launch.model, arguments)
                assert url is not None
                closed_loop(sender, url, list(itertools.islice(bodies, LEAST)), 1)  # imports, kernels, connections
                for size in sorted(arguments.sizes):
                    count = size if stage == "decode" else max(LEAST, arguments.turns * size)
                    records = closed_loop(sender, url, list(itertools.islice(bodies, count)), size)
                    yield row_of(stage, size, records, prompt=arguments.prompt, answer=arguments.answer)


def bodies_of(stage: str, model: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Requests without end, none of which has anything that a cache could know."""
    image = demo_image(0, arguments.side).url
    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        "encode": lambda n: encode_body(model, image, f"batches {n}"),
        "prefill": lambda n: text_body(model, tokens=arguments.prompt, answer=1, stream=False, seed=n),
        "decode": lambda n: stream_body(model, -1 - n, SHORT_PROMPT, arguments.answer),
    }
    return map(kinds[stage], itertools.count())


def row_of(stage: str, size: int, records: Sequence[RequestRecord], *, prompt: int, answer: int) -> Row:
    """A stage with `size` requests under way: `per_s` of what it makes, and milliseconds of each.

    Raises:
        StageError: answers are too short to be timed.
    """
    if stage == "decode":
        each_s = [tpot_s(one, answer) for one in records]
        if min(each_s) <= 0:
            raise StageError("decode: all tokens of an answer came together: ask for a longer --answer", stage=stage)
        per_s = float(np.sum(np.reciprocal(each_s)))
    else:
        each_s = [one.e2e_s for one in records]
        per_s = (prompt if stage == "prefill" else 1) * len(records) / seconds_of(records)
    row = {"stage": stage, "size": size, "requests": len(records), "per_s": round(per_s, 4)}
    return row | {"each_ms": round(float(np.mean(each_s)) * 1e3, 4)}


def by_stage(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups = grouped(sorted(rows, key=lambda row: row["size"]), "stage")
    return {stage: groups[stage,] for stage in UNITS if (stage,) in groups}


def saturates_at(rows: Sequence[Row]) -> int | None:
    """The least size with nearly the best throughput of these rows of one stage. None where that is the largest that
    was measured: a larger one may give more."""
    best = max((row["per_s"] for row in rows), default=0.0)
    return min((row["size"] for row in rows[:-1] if row["per_s"] >= SATURATED * best), default=None)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    named: dict[str, float] = {}
    for stage, own in by_stage(rows).items():
        named |= {f"{stage}/{row['size']}/{name}": row[name] for row in own for name in ("per_s", "each_ms")}
        if (size := saturates_at(own)) is not None:
            named[f"{stage}/saturates_at"] = size
    return named


def tables(rows: Sequence[Row]) -> Iterable[str]:
    """A table per stage, with the gain over the smallest batch."""
    for stage, own in by_stage(rows).items():
        (per_s, each_ms), size = UNITS[stage], saturates_at(own)
        marks = [{"times": row["per_s"] / own[0]["per_s"], "at": "saturated" * (row["size"] == size)} for row in own]
        yield table_of(
            [{**row, **mark} for row, mark in zip(own, marks, strict=True)],
            {
                f"{stage}: requests under way": "{size}",
                per_s: "{per_s:.1f}",
                "times": "{times:.2f}",
                "": "{at}",
                each_ms: "{each_ms:.1f}",
            },
        )


def draw(path: Path, rows: Sequence[Row], heading: str) -> None:
    """A panel per stage: throughput (left axis) and latency (right) against batch size. Needs matplotlib."""
    stages = by_stage(rows)
    title = f"Throughput and latency of a stage against its batch size, 1 device each\n{heading}; dotted: saturated"
    with chart(path, 4.6 * len(stages), 4.0, title) as figure:
        panels = figure.subplots(1, len(stages), squeeze=False)[0]
        for left, (stage, own) in zip(panels, stages.items(), strict=True):
            sizes = [row["size"] for row in own]
            lines = ((left, "per_s", BLUE, "o-"), (left.twinx(), "each_ms", VERMILLION, "s--"))
            for (ax, name, colour, style), unit in zip(lines, UNITS[stage], strict=True):
                ax.plot(sizes, [row[name] for row in own], style, color=colour, linewidth=1.8)
                ax.set_ylabel(f"{unit} ({'full line' if ax is left else 'dashed'})", fontsize=9, color=colour)
                ax.set_ylim(0, 1.1 * max(row[name] for row in own))
                ax.tick_params(labelsize=8)
            if (size := saturates_at(own)) is not None:
                left.axvline(size, color="#767676", linestyle=":", linewidth=1.2)
            left.set_xscale("log", base=2)
            left.set_xticks(sizes, [str(size) for size in sizes])
            left.set_xlabel("requests under way", fontsize=9)
            left.set_title(stage, fontsize=9, loc="left")


MEASUREMENT = Measurement(
    quick="sizes 1,2,4, fewer requests of each",
    flags=FLAGS,
    add_flags=add_engine_flags,
    settings=SETTINGS,
    about=kind_of,
    measure=measure,
    figures=figures,
    tables=tables,
    plot=draw,
)
add_arguments = MEASUREMENT.add_arguments
