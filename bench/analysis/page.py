"""`epd-bench report`: draw a results folder of `epd-bench layouts` again, whole or interrupted.

Into the folder go a PNG for each figure, a CSV for each table, and report.html, from `report.html.j2`, which has all of
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
    "phases": ("Phases (HydraInfer Figs. 11 and 13)", ("phases",), ("phases",)),
}
"""By anchor: title, figures, tables."""
SHOWN = 9
"""Columns of a table that the terminal shows: the others are in the page."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="that `epd-bench layouts --out` wrote")
    parser.add_argument("--rate", type=float, metavar="R", help="of the phases (default the highest)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Draw, and print what is best. Returns 0; 1 where no run is valid, since then it says nothing."""
    return draw(arguments.folder, arguments.rate)


def draw(folder: Path, rate: float | None = None) -> int:
    """The report of a folder: its files, and in the terminal what is missing, and each rate."""
    results = read_sweep(folder)
    paths, tables = write_report(results, rate)
    for name in ("gaps", "rates"):
        if (one := tables[name]).lines:
            print(f"\n{one.title}\n\n{text_table([line[:SHOWN] for line in [one.columns, *one.cells]])}")
    print(f"\n{results.experiment.kind}: {len(paths)} files, of which {folder / PAGE} has all of it", flush=True)
    return 0 if any(run.valid for run in results.runs) else 1


def missing_libraries(needed: Sequence[str] = NEEDS) -> str:
    """Those that are not installed, and how to install them; "" where all are."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"this needs {', '.join(missing)}: pip install 'epd-serve[bench]'" if missing else ""


def require(needed: Sequence[str] = NEEDS) -> None:
    """Raises ConfigError where a library is missing: before anything is measured that could not be judged."""
    if missing := missing_libraries(needed):
        raise ConfigError(missing)


def write_report(results: SweepResults, wanted_rate: float | None = None) -> tuple[list[Path], Mapping[str, Table]]:
    """The paths of all files of a report, written into the sweep's folder, and its tables.

    Args:
        wanted_rate: of the phases; default the highest.

    Raises:
        ConfigError: a library is missing, nothing was measured at that rate, or a file cannot be written.
    """
    require()
    import jinja2

    rate = max(results.rates, default=None) if wanted_rate is None else wanted_rate
    if wanted_rate is not None and wanted_rate not in results.rates:
        measured = ", ".join(f"{one:g}" for one in results.rates) or "none"
        raise ConfigError(f"--rate {wanted_rate:g}: nothing was measured at it, but at {measured}", param="--rate")
    tables, figures = all_tables(results), all_figures(results, rate)
    paths = {name: results.folder / f"{name}.png" for name in figures}
    files = {results.folder / f"{table.name}.csv": table.csv(results.experiment.kind) for table in tables.values()}
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    try:
        for name, path in paths.items():
            save(results, figures[name], path)
        files[results.folder / PAGE] = environment.get_template(TEMPLATE).render(
            experiment=results.experiment,
            sections=SECTIONS,
            tables=tables,
            titles={name: title for name, (title, _) in figures.items()},
            images={name: base64.b64encode(path.read_bytes()).decode() for name, path in paths.items()},
            facts=facts(results),
            good_share=f"{GOOD_SHARE:g}",
        )
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}", param="DIR") from error
    return [*paths.values(), *files], tables
