"""`epd-bench startup`: time to ready per layout against the slowest of its stages started alone, and our imports.

Two cores start several vLLM processes in turns, so a layout of three stages cannot be as fast as one: the ratio says
what that costs here, the imports say what of it is ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.alone import seconds_to_ready
from bench.imports import import_seconds
from bench.record import record, write
from bench.served import served
from deploy.blueprint import draw
from deploy.config import DeployConfig
from deploy.placement_table import table

LAYOUTS = "TP1,(E-PD),E-PD,EP-D,(E-P)-D,E-P-D"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", default=LAYOUTS, help="comma-separated")
    parser.add_argument("--output", type=Path, default=Path("bench/results/startup.json"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start each role once alone, each layout once, print the table, write the record."""
    head = record(argv)
    blueprints = {layout: draw(DeployConfig(layout=layout, device="cpu")) for layout in arguments.layouts.split(",")}
    imports = import_seconds()
    alone: dict[str, float] = {}
    for blueprint in blueprints.values():
        for plan in blueprint.plans:
            if plan.role.value not in alone:
                alone[plan.role.value] = seconds_to_ready(blueprint, plan)
                print(f"{plan.role.value} alone: {alone[plan.role.value]:.1f} s", flush=True)
    layouts = {}
    for layout, blueprint in blueprints.items():
        slowest = max(alone[plan.role.value] for plan in blueprint.plans)
        with served(layout) as launch:
            layouts[layout] = {
                "stages": len(blueprint.plans),
                "ready_s": launch.ready_s,
                "own_ready_s": launch.own_ready_s,
                "slowest_stage_alone_s": slowest,
                "ratio": launch.ready_s / slowest,
            }
        print(f"{layout}: {layouts[layout]['ready_s']:.1f} s", flush=True)
    print(f"\n{text(layouts)}\n\n{_imports_text(imports)}\n\nAll figures are real; one start each.")
    write(arguments.output, {**head, "alone_s": alone, "layouts": layouts, "own_imports_s": imports})
    return 0


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
