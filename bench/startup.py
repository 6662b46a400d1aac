"""`epd-bench startup`: time to ready per layout against the slowest of its stages started alone, and our imports.

Everything is started `--rounds` times in turns; medians. Every start has the load it met in the record: a figure with
somebody else's work in it shows.

Two cores start several vLLM processes in turns, so a layout of three stages cannot be as fast as one: the ratio says
what that costs here, the imports say what of it is ours.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.alone import seconds_to_ready
from bench.imports import import_seconds
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, flatten, write
from bench.served import served
from deploy.blueprint import draw
from deploy.config import DeployConfig
from deploy.placement_table import table

LAYOUTS = "TP1,(E-PD),E-PD,EP-D,(E-P)-D,E-P-D"
QUICK_LAYOUTS = "TP1,(E-P)-D"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", help=f"comma-separated (default {LAYOUTS}, quick {QUICK_LAYOUTS})")
    parser.add_argument("--rounds", type=int, help="starts of each (default 3, quick 1)")
    add_record_arguments(parser, quick="one start each of the monolith and of (E-P)-D with its stages")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start each role once alone, each layout once, print the table, write the record."""
    env = environment(argv, asked=arguments)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    names = arguments.layouts or (QUICK_LAYOUTS if arguments.quick else LAYOUTS)
    blueprints = {layout: draw(DeployConfig(layout=layout, device="cpu")) for layout in names.split(",")}
    imports = import_seconds()
    roles = {plan.role.value: (blueprint, plan) for blueprint in blueprints.values() for plan in blueprint.plans}
    starts: list[dict[str, Any]] = []
    for _ in range(rounds):
        starts += [_start(f"{role} alone", lambda one=one: seconds_to_ready(*one)) for role, one in roles.items()]  # type: ignore[misc]
        starts += [_start(layout, lambda layout=layout: _seconds_to_serve(layout)) for layout in blueprints]  # type: ignore[misc]
    alone = {role: _median(starts, f"{role} alone") for role in roles}
    layouts = {}
    for layout, blueprint in blueprints.items():
        slowest = max(alone[plan.role.value] for plan in blueprint.plans)
        ready = _median(starts, layout)
        layouts[layout] = {
            "stages": len(blueprint.plans),
            "ready_s": ready,
            "slowest_stage_alone_s": slowest,
            "ratio": ready / slowest,
        }
    print(f"\n{text(layouts)}\n\n{_imports_text(imports)}\n\nReal; medians of {rounds} starts each.")
    write(arguments.json, flatten({"alone_s": alone, "layouts": layouts, "own_imports_s": imports}), env, starts)
    return 0


def _start(what: str, seconds: Callable[[], float]) -> dict[str, Any]:
    load = os.getloadavg()[0]
    taken = seconds()
    print(f"{what}: {taken:.1f} s (load before: {load:.1f})", flush=True)
    return {"what": what, "seconds": taken, "load_average_before": load}


def _seconds_to_serve(layout: str) -> float:
    with served(layout) as launch:
        return launch.ready_s


def _median(starts: Sequence[dict[str, Any]], what: str) -> float:
    return statistics.median(float(start["seconds"]) for start in starts if start["what"] == what)


def text(layouts: dict[str, dict[str, float]]) -> str:
    """The table of time to ready."""
    rows: list[tuple[str, ...]] = [("layout", "stages", "ready s", "slowest stage alone s", "ratio")]
    for layout, figure in layouts.items():
        seconds = (f"{figure[name]:.1f}" for name in ("ready_s", "slowest_stage_alone_s"))
        rows.append((layout, f"{figure['stages']:.0f}", *seconds, f"{figure['ratio']:.2f}"))
    return table(rows)


def _imports_text(imports: dict[str, float]) -> str:
    rows = [("our own imports", "s"), *((part, f"{seconds:.3f}") for part, seconds in imports.items())]
    return table([*rows, ("sum", f"{sum(imports.values()):.3f}")])
