"""`epd-bench proxy`: how much the proxy costs, over simulated stages.

Stages are simulated (`epd-serve serve --engine sim`), everything between them, the proxy and the clients is real: HTTP,
sockets, processes. `--only PART` measures one of the parts below, else all of them one after another. How the proxy
keeps its promises over minutes is tested in tests/soak.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.goals import goal_table
from bench.micro.proxy import breakdown, burst, irp, peers, speed
from bench.micro.proxy.part import Options, Part
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from epd_serve.errors import EpdError, StageError

PARTS: tuple[Part, ...] = (speed.PART, peers.PART, breakdown.PART, burst.PART, irp.PART)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(f"{part.name} ({part.what})" for part in PARTS)
    parser.add_argument("--only", choices=[part.name for part in PARTS], metavar="PART", action="append", help=names)
    parser.add_argument("--peer-vllm", type=Path, metavar="FILE", help="vLLM's example proxy, instead of fetching it")
    parser.add_argument("--peer-ascend", type=Path, metavar="FILE", help="vllm-ascend's example proxy, likewise")
    add_record_arguments(parser, quick="shorter runs, fewer rounds")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure part by part; print and write what there is so far.

    A part that cannot be measured keeps nobody waiting and costs the others nothing: one that lacks what it needs from
    elsewhere is left out, or refused at once if it was asked for by name; one that fails is named at the end.
    """
    env = environment(argv, kind="real proxy, clients and sockets; simulated stages", asked=arguments)
    options = Options(arguments.quick, arguments.peer_vllm, arguments.peer_ascend)
    parts = [part for part in PARTS if not arguments.only or part.name in arguments.only]
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    lacking = _unfetched(parts, options, by_name=bool(arguments.only))
    failed: dict[str, str] = {}
    for part in parts:
        if part.name in lacking:
            continue
        try:
            result = part.measure(options)
        except EpdError as error:
            failed[part.name] = str(error)
            print(f"\n{part.name}: failed: {error}", flush=True)
            continue
        figures |= result.figures
        rows += [{**row, "part": part.name} for row in result.rows]
        print(f"\n{part.name}: {part.what}\n\n{result.text}", flush=True)
        write(arguments.json, figures, env, rows)  # after each: all of them take half an hour
    print(f"\n{goal_table(figures, tuple(goal for part in parts for goal in part.goals))}")
    for name, why in (lacking | failed).items():
        print(f"\nnot measured: {name}: {why}")
    return 1 if failed else 0


def _unfetched(parts: Sequence[Part], options: Options, *, by_name: bool) -> dict[str, str]:
    """Returns parts that lack what they need from elsewhere, and why. Raises StageError for one of `--only`."""
    lacking: dict[str, str] = {}
    for part in parts:
        try:
            part.fetch(options)
        except StageError as error:
            if by_name:
                raise
            lacking[part.name] = str(error)
            print(f"{part.name} is left out: {error}", flush=True)
    return lacking
