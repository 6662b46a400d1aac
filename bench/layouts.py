"""`epd-bench layouts`: start each layout, load it at each rate, take it down; then draw what differs.

Layouts and baselines are measured one after the other on this machine, with the same requests, and compared per device.
Every rate is kept as it ends: the same command goes on where an interruption left off, and ends with 0 once every
deployment has a valid run of every rate. See docs/measuring/layouts.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from bench.analysis.page import draw, missing_libraries
from bench.record import busy, environment, write
from bench.sweep.experiment import Experiment
from bench.sweep.flags import add_flags, experiment_of, stages_of
from bench.sweep.stages import Stages
from bench.sweep.store import RESULT, ResultStore, opened, summary
from epd_serve.errors import StageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure what is missing, keep it, draw it. Returns 0, 1 where something is missing or not valid, 128 + signal."""
    with stages_of(arguments, argv) as stages:
        env = environment(argv, stages.kind, arguments)
        experiment = experiment_of(arguments, stages, env)
        stages.check(experiment)
        if warning := busy(env):
            print(warning, file=sys.stderr)
        with opened(arguments.out, experiment, fresh=arguments.fresh) as stores:
            ended_by = _measure(experiment, stages, stores)
            figures, env, rows = summary(experiment, stores, env)
            write(arguments.out / RESULT, figures, env, rows, "--out")
            if arguments.json is not None:
                write(arguments.json, figures, env, rows)
            if missing := missing_libraries():
                print(f"not drawn: {missing}; then `epd-bench report {arguments.out}`", file=sys.stderr)
            elif rows and not ended_by:
                draw(arguments.out)
    if ended_by:
        print("epd-bench: interrupted; what was measured is kept, the same command goes on", file=sys.stderr)
        return 128 + ended_by
    return _report_gaps(experiment, stores)


def _measure(experiment: Experiment, stages: Stages, stores: Sequence[ResultStore]) -> int:
    """All deployments, as far as they go. Returns the signal that ended it, else 0."""
    try:
        for at, store in enumerate(stores, 1):
            title, missing = f"[{at}/{len(stores)}] {store.deployment.label}", store.missing(experiment)
            print(f"\n{title}: {', '.join(run.label for run in missing) or 'measured already'}", flush=True)
            if not missing:
                continue
            try:
                stages.measure(experiment, store)
            except StageError as error:
                store.fail(error.message)
                print(f"{title}: {error.message}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return signal.SIGINT
    except SystemExit as ended:  # of a signal: `bench/cli.py`
        return int(ended.code or 0) - 128
    return 0


def _report_gaps(experiment: Experiment, stores: Sequence[ResultStore]) -> int:
    """What is missing or not valid, a line each; the exit code."""
    gaps: list[str] = []
    for store in stores:
        name, rows = store.deployment.name, store.rows
        gaps += [f"{name}, {run.label}: not measured. {store.failure}" for run in store.missing(experiment)]
        gaps += [f"{name}, {row['run']}: not valid. {row['objections'][0]}" for row in rows if not row["valid"]]
    for gap in gaps:
        print(f"epd-bench: {gap}", file=sys.stderr)
    return 1 if gaps else 0
