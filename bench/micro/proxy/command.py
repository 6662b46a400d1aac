"""`epd-bench proxy`: how much the proxy costs, over simulated stages.

Stages are simulated (`epd-serve serve --engine sim`), everything between them, the proxy and the clients is real: HTTP,
sockets, processes. `--only PART` measures one of the parts below, else all of them one after another. One that lacks
what it needs from elsewhere is left out, or refused at once if it was asked for by name; one that fails costs the
others nothing, but fails the command. How the proxy keeps its promises over minutes is tested in tests/soak.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.goals import Goal
from bench.micro.measurement import Measurement, Row, flag
from bench.micro.proxy import burst, irp, speed
from bench.micro.rows import grouped
from epd_serve.errors import EpdError, StageError

PARTS: dict[str, Measurement] = {
    "speed": speed.MEASUREMENT,
    "peers": speed.PEERS,
    "burst": burst.MEASUREMENT,
    "irp": irp.MEASUREMENT,
}
FLAGS = {
    "--only": flag(
        ", ".join(f"{name} ({part.what})" for name, part in PARTS.items()),
        choices=PARTS,
        metavar="PART",
        action="append",
    ),
    "--peer-vllm": flag("vLLM's example proxy, instead of fetching it", type=Path, metavar="FILE"),
    "--peer-ascend": flag("vllm-ascend's example proxy, likewise", type=Path, metavar="FILE"),
}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows part by part; a part that could not be measured has a last row that says why.

    Raises:
        StageError: a part that was asked for by name lacks what it needs from elsewhere.
    """
    names = [name for name in PARTS if not arguments.only or name in arguments.only]
    lacking = {name: why for name in names if (why := _lack(PARTS[name], arguments))}
    for name, why in lacking.items():
        print(f"{name} is left out: {why}", flush=True)
        yield {"part": name, "left_out": why}
    for name in (name for name in names if name not in lacking):
        print(f"{name}: {PARTS[name].what}", flush=True)
        try:
            yield from ({**row, "part": name} for row in PARTS[name].measure(arguments))
        except EpdError as error:
            yield {"part": name, "failed": str(error)}


def _lack(part: Measurement, arguments: argparse.Namespace) -> str:
    """Why the part cannot be measured here, or ""."""
    try:
        part.fetch(arguments)
    except StageError as error:
        if arguments.only:
            raise
        return str(error)
    return ""


def _by_part(rows: Sequence[Row]) -> dict[str, tuple[list[Row], str]]:
    """Of each part its rows, and why it was not measured, or ""."""
    parts = grouped(rows, "part")
    return {name: (own, own[-1].get("failed") or own[-1].get("left_out", "")) for (name,), own in parts.items()}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Those of all parts that were measured, and how many failed."""
    named: dict[str, float] = {"failed_parts": sum("failed" in row for row in rows)}
    for name, (own, why_not) in _by_part(rows).items():
        named |= {} if why_not else PARTS[name].figures(own)
    return named


def tables(rows: Sequence[Row]) -> Iterable[str]:
    for name, (own, why_not) in _by_part(rows).items():
        yield f"not measured: {name}: {why_not}" if why_not else f"{name}: {PARTS[name].what}"
        yield from () if why_not else PARTS[name].tables(own)


MEASUREMENT = Measurement(
    quick="shorter runs, fewer rounds",
    flags=FLAGS,
    about=lambda arguments: {"kind": "real proxy, clients and sockets; simulated stages"},
    measure=measure,
    figures=figures,
    tables=tables,
    goals=tuple(goal for part in PARTS.values() for goal in part.goals),
    required=(Goal("failed_parts", "==", 0),),
)
add_arguments = MEASUREMENT.add_arguments
