"""`epd-bench report`: draw a results folder of `epd-bench layouts` again, whole or interrupted.

Into the folder go a PNG for each figure, a CSV for each table, and report.html, which has all of it inside. Needs
matplotlib, SciPy and Jinja2: pip install 'epd-serve[bench]'.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.analysis.page import PAGE, write_report
from bench.analysis.sweep_results import read_sweep
from bench.analysis.tables import Table, best, chosen_rate, gaps, table5
from deploy.placement_table import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="that `epd-bench layouts --out` wrote")
    parser.add_argument("--rate", type=float, metavar="R", help="of Table 5 and the phases (default the highest)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Draw, and print what is best. Returns 0; 1 where no run is valid, since then it says nothing."""
    return draw(arguments.folder, arguments.rate)


def draw(folder: Path, rate: float | None = None) -> int:
    """The report of a folder: its files, and in the terminal what is missing, Table 5 and the best."""
    results = read_sweep(folder)
    paths = write_report(results, rate)
    at = chosen_rate(results, rate)
    _print(gaps(results))
    if at is not None:
        _print(table5(results, at), columns=9)
        _print(best(results), columns=8)
    print(f"\n{results.experiment.kind}: {len(paths)} files, of which {folder / PAGE} has all of it", flush=True)
    return 0 if any(run.valid for run in results.runs) else 1


def _print(one: Table, columns: int | None = None) -> None:
    """Its first columns: the others are in the page."""
    if one.lines:
        print(f"\n{one.title}\n\n{table([line[:columns] for line in [one.columns, *one.cells]])}")
