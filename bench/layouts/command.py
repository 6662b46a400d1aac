"""`epd-bench layouts`: start each layout, load it at each rate, take it down; then draw what differs.

Layouts and baselines are measured one after the other on this machine, with the same requests, and compared per device.
Every rate is kept as it ends: the same command goes on where an interruption left off, and ends with 0 once every
entry has a valid run of every rate. See docs/measuring/layouts.md.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.layouts.book import RESULT, Book, write_result
from bench.layouts.experiment import Experiment
from bench.layouts.flags import add_flags, emulation, experiment_of, judged_of, kind_of, scripts_of
from bench.layouts.folder import Folder, opened
from bench.layouts.requests import Requests
from bench.layouts.serving import Serving
from bench.layouts.table import table_of
from bench.layouts.way import Way
from bench.layouts.whole import unfinished, whole
from bench.record import busy, environment, write
from bench.report.folder import read
from bench.report.whole import PAGE, report
from bench.scratch import scratch
from bench.workloads.pictures import Pictures
from bench.workloads.workload import workload
from epd_serve.demo.presets import builtin_model_dir, write_preset
from epd_serve.errors import StageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure what is missing, keep it, draw it. Returns 0, 1 where something is missing or not valid, 128 + signal."""
    env = environment(argv, kind_of(arguments), arguments)
    experiment = experiment_of(arguments, env)
    if not arguments.emulate and (warning := busy(env)):
        print(warning, file=sys.stderr)
    number = 0
    with opened(arguments.out, experiment, fresh=arguments.fresh) as folder:
        try:
            with _way(arguments, argv) as way:
                way.check(experiment)
                folder.begin()
                for at, book in enumerate(folder.books, 1):
                    _entry(experiment, way, book, f"[{at}/{len(folder.books)}]")
        except KeyboardInterrupt:
            number = signal.SIGINT
        except SystemExit as ended:  # of a signal: `bench/cli.py`
            number = int(ended.code or 0) - 128
        figures, said, rows = whole(experiment, folder.books, env)
        if arguments.emulate and not number:
            against, details = emulation(arguments.emulate).against_paper(quick=arguments.quick)
            figures, rows = figures | against, rows + details
        write_result(folder.path / RESULT, figures, said, rows)
        if arguments.json is not None:
            write(arguments.json, figures, said, rows)
        print(f"\n{table_of(experiment, folder.books)}")
        if not number and rows:
            _draw(folder.path)
        return _ended(experiment, folder, number)


def _entry(experiment: Experiment, way: Way, book: Book, at: str) -> None:
    """One entry, as far as it goes. Only what concerns all of them is raised."""
    entry = book.entry
    missing = book.missing(experiment.runs(entry))
    if not missing:
        print(f"{at} {entry.name}: measured already", flush=True)
        return
    count = f"{entry.devices} device{'s' if entry.devices > 1 else ''}"
    print(f"\n{at} {entry.name}, {count}: {', '.join(run.label for run in missing)}", flush=True)
    try:
        way.measure(experiment, book)
    except StageError as error:
        book.failed(error.message)
        print(f"{at} {entry.name}: {error.message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _way(arguments: argparse.Namespace, argv: Sequence[str]) -> Iterator[Way]:
    """How entries are measured, with the model that they serve, for the time of the context."""
    if arguments.emulate:
        requests = workload(arguments.workload, arguments)
        yield emulation(arguments.emulate, requests, judged_of(arguments), argv, arguments)
        return
    rendered = Requests(workload(arguments.workload, arguments), Pictures(arguments.cache), arguments.seed)
    with scratch() as folder:
        words = _words(arguments, folder)
        yield Serving(rendered, words, judged_of(arguments), scripts_of(arguments), argv, arguments)


def _words(arguments: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    """What every `epd-serve serve` gets."""
    if arguments.engine == "sim":
        profile = ("--sim-profile", str(Path(arguments.sim_profile).resolve())) if arguments.sim_profile else ()
        return ("--engine", "sim", *profile)
    model = arguments.model
    if not model and arguments.preset == "demo":
        model = str(builtin_model_dir())
    elif not model:
        model = str(folder / arguments.preset)
        write_preset(Path(model), arguments.preset)
    return (model, "--device", arguments.device)


def _draw(path: Path) -> None:
    """Charts, tables and the page. Raises ConfigError where they cannot be written; figures are kept by then."""
    made = report(path, read(path))
    print(f"\n{made.verdict.text()}\n\n{len(made.paths)} files in {path}; {PAGE} has all of it", flush=True)


def _ended(experiment: Experiment, folder: Folder, number: int) -> int:
    again = f"the same command goes on in {folder.path}"
    if number:
        print(f"epd-bench: interrupted; what was measured is kept, {again}", file=sys.stderr)
        return 128 + number
    problems = unfinished(experiment, folder.books)
    for problem in problems:
        print(f"epd-bench: {problem}", file=sys.stderr)
    if any(book.missing(experiment.runs(book.entry)) for book in folder.books):
        print(f"epd-bench: {again} with what is missing", file=sys.stderr)
    return 1 if problems else 0
