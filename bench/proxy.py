"""`epd-bench proxy`: how much the proxy costs, and how well it keeps what it promises, over simulated stages.

Stages are simulated (`epd-serve serve --engine sim`; with `--real` the part `kills` has real ones too), everything
between them, the proxy and the clients is real: HTTP, sockets, processes. `--only PART` measures one of the parts
below, else all of them one after another.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import (
    proxy_breakdown,
    proxy_burst,
    proxy_kills,
    proxy_leave,
    proxy_memory,
    proxy_peers,
    proxy_speed,
    proxy_streams,
)
from bench.goals import goal_table
from bench.micro import irp
from bench.proxy_part import Options, Part
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from epd_serve.errors import EpdError, StageError

PARTS: tuple[Part, ...] = (
    proxy_speed.PART,
    proxy_peers.PART,
    proxy_breakdown.PART,
    proxy_burst.PART,
    proxy_kills.PART,
    proxy_leave.PART,
    proxy_memory.PART,
    proxy_streams.PART,
    irp.PART,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(f"{part.name} ({part.what})" for part in PARTS)
    parser.add_argument("--only", choices=[part.name for part in PARTS], metavar="PART", action="append", help=names)
    parser.add_argument("--peer-vllm", type=Path, metavar="FILE", help="vLLM's example proxy, instead of fetching it")
    parser.add_argument("--peer-ascend", type=Path, metavar="FILE", help="vllm-ascend's example proxy, likewise")
    parser.add_argument("--real", action="store_true", help="kills: of real stages too, which takes minutes more")
    add_record_arguments(parser, quick="shorter runs, fewer rounds")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure part by part; print and write what has been found so far.

    A part that cannot be measured keeps nobody waiting and costs the others nothing: one that lacks what it needs from
    elsewhere is left out, or refused at once if it was asked for by name; one that fails is named at the end.
    """
    also = ", real ones where a figure's name says so" if arguments.real else ""
    env = environment(argv, kind="real proxy, clients and sockets; simulated stages" + also, asked=arguments)
    options = Options(arguments.quick, arguments.peer_vllm, arguments.peer_ascend, arguments.real)
    parts = [part for part in PARTS if not arguments.only or part.name in arguments.only]
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    lacking = _fetched(parts, options, by_name=bool(arguments.only))
    failed: dict[str, str] = {}
    for part in parts:
        if part.name in lacking:
            continue
        try:
            found = part.measure(options)
        except EpdError as error:
            failed[part.name] = str(error)
            print(f"\n{part.name}: failed: {error}", flush=True)
            continue
        figures |= found.figures
        rows += [{**row, "part": part.name} for row in found.rows]
        print(f"\n{part.name}: {part.what}\n\n{found.text}", flush=True)
        write(arguments.json, figures, env, rows)  # after each: all of them take three quarters of an hour
    print(f"\n{goal_table(figures, tuple(goal for part in parts for goal in part.goals))}")
    for name, why in (lacking | failed).items():
        print(f"\nnot measured: {name}: {why}")
    return 1 if failed else 0


def _fetched(parts: Sequence[Part], options: Options, *, by_name: bool) -> dict[str, str]:
    """Parts that lack what they need from elsewhere, and why. Raises StageError for one that was asked for by name."""
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
