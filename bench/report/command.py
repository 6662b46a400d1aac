"""`epd-bench report`: draw a results folder of `epd-bench layouts` again, whole or interrupted.

Into the folder go a PNG and a CSV for each figure, a CSV for each table, and report.html, which has all of it inside.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.report import folder, style
from bench.report.about import problems
from bench.report.deployments import chosen_rate, deployments
from bench.report.sheet import NOTHING, shown
from bench.report.whole import PAGE, report
from deploy.placement_table import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="that `epd-bench layouts --out` wrote")
    parser.add_argument("--rate", type=float, metavar="R", help="of Table 5 and the phases (default the highest)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Draw, say what it says. Returns 0; 1 where no run is valid, since then it says nothing."""
    experiment = folder.read(arguments.folder)
    made = report(arguments.folder, experiment, arguments.rate)
    rate = chosen_rate(experiment, arguments.rate)
    for problem in problems(experiment):
        print(f"  note: {problem}")
    if rate is not None:
        sheet = deployments(experiment, rate, experiment.slos[:1])
        rows = [tuple(NOTHING if cell is None else shown(cell) for cell in row) for row in sheet.rows]
        print(f"\n{experiment.kind}: {sheet.title}\n\n{table([sheet.columns, *rows])}")
    print(f"\n{made.verdict.text()}\n\n{len(made.paths)} files, of which {arguments.folder / PAGE} has all of it")
    if not style.can_draw():
        print(style.MISSING)
    return 0 if any(run.valid for _, run in experiment.all_runs()) else 1
