"""`epd-bench report`: draw a results folder of `epd-bench layouts` again, whole or interrupted.

Into the folder go a PNG for each figure, and report.html, from `report.html.j2`, which has all of
it inside: pictures and tables in one file, no script, nothing from elsewhere. Well-formed as XML too. Needs matplotlib
and Jinja2: pip install 'epd-serve[bench]'.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.analysis.plots import all_figures, save
from bench.analysis.sweep_results import SweepResults, read_sweep
from bench.analysis.tables import GOOD_SHARE, Table, all_tables, facts
from deploy.memory.placement_table import table as text_table
from epd_serve.errors import ConfigError

PAGE, TEMPLATE = "report.html", "report.html.j2"
NEEDS = ("matplotlib", "jinja2")
SECTIONS: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "attainment": ("SLO attainment (EPD-Serve Figs. 8 and 12)", ("attainment",), ()),
    "throughput": ("Throughput (EPD-Serve Figs. 9 and 13)", ("throughput",), ()),
    "ttft": ("TTFT (EPD-Serve Figs. 10 and 14)", ("ttft",), ()),
    "tpot": ("TPOT (EPD-Serve Figs. 11 and 15)", ("tpot",), ()),
    "rates": ("Numbers by rate (EPD-Serve Table 5)", (), ("goodput", "rates", "ratios")),
    "phases": ("Phases (HydraInfer Figs. 11 and 13)", (), ("phases",)),
}
"""By anchor: title, figures, tables."""
SHOWN = 9
"""Columns of a table that the terminal shows: the others are in the page."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="that `epd-bench layouts --out` wrote")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Draw, and print what is best. Returns 0; 1 where no run is valid, since then it says nothing."""
    return draw(arguments.folder)


def draw(folder: Path) -> int:
    """The report of a folder: its files, and in the terminal what is missing, and each rate."""
    results = read_sweep(folder)
    tables = write_report(results)
    for name in ("gaps", "rates"):
        if (one := tables[name]).lines:
            print(f"\n{one.title}\n\n{text_table([line[:SHOWN] for line in [one.columns, *one.cells]])}")
    print(f"\n{results.experiment.kind}: {folder / PAGE}", flush=True)
    return 0 if any(run.valid for run in results.runs) else 1


def missing_libraries(needed: Sequence[str] = NEEDS) -> str:
    """Those that are not installed, and how to install them; "" where all are."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"this needs {', '.join(missing)}: pip install 'epd-serve[bench]'" if missing else ""


def require(needed: Sequence[str] = NEEDS) -> None:
    """Raises ConfigError where a library is missing: before anything is measured that could not be judged."""
    if missing := missing_libraries(needed):
        raise ConfigError(missing)


def write_report(results: SweepResults) -> Mapping[str, Table]:
    """Write all files of a report into the sweep's folder; returns its tables.

    Raises:
        ConfigError: a library is missing, or a file cannot be written.
    """
    require()
    import jinja2

    tables, figures = all_tables(results), all_figures(results)
    paths = {name: results.folder / f"{name}.png" for name in figures}
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    try:
        for name, path in paths.items():
            save(results, figures[name], path)
        page = environment.get_template(TEMPLATE).render(
            experiment=results.experiment,
            sections=SECTIONS,
            tables=tables,
            titles={name: ", ".join(one.name for one in metrics) for name, metrics in figures.items()},
            images={name: base64.b64encode(path.read_bytes()).decode() for name, path in paths.items()},
            facts=facts(results),
            good_share=f"{GOOD_SHARE:g}",
        )
        (results.folder / PAGE).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}", param="DIR") from error
    return tables
