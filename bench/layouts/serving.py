"""The runs of an entry by starting it as a user does, loading it, and taking it down again.

Order: start, ask a few requests alone (their tokens are compared), warm up, a run per rate. A stage that ends while a
rate is measured ends the entry: that rate is not kept, and the next call measures it and what is missing after it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.client.row import Row
from bench.client.rows_file import RowsFile
from bench.client.sweep import Found, Sweep
from bench.client.target import Target
from bench.layouts.batches import Sampler
from bench.layouts.book import BATCHES, PHASES, ROWS, Book
from bench.layouts.entry import Entry, How
from bench.layouts.experiment import Experiment, Planned
from bench.layouts.judged import Judged
from bench.layouts.peers import over
from bench.layouts.plain_vllm import plain_vllm
from bench.layouts.requests import Requests
from bench.layouts.up import Up, status_table
from bench.record import environment
from bench.served import served
from deploy.blueprint import Blueprint, draw
from deploy.cli import serve_config
from epd_serve.errors import ConfigError, StageError

WARM_UP = 6
"""Requests for each device before the first run: a stage's first few take up to three times as long as the next."""


@dataclass(frozen=True)
class Serving:
    """The `Way` of real and of simulated stages.

    Attributes:
        words: of every `epd-serve serve`: model, engine, device.
        scripts: of the example proxies. argv, asked: of this command, for the record.
    """

    requests: Requests
    words: tuple[str, ...]
    judged: Judged = field(default_factory=Judged)
    scripts: Mapping[How, Path] = field(default_factory=dict)
    argv: Sequence[str] = ()
    asked: argparse.Namespace | None = None

    def check(self, experiment: Experiment) -> None:
        """Each entry as its launch would check it. Raises ConfigError, LayoutError."""
        for entry in experiment.entries:
            self._blueprint(entry)

    def measure(self, experiment: Experiment, book: Book) -> None:
        entry = book.entry
        env = environment(self.argv, experiment.kind, self.asked)
        with self._up(entry) as up:
            print(f"{entry.name}: ready in {up.ready_s:.0f} s", flush=True)
            if up.shared_cores:
                print(f"{entry.name}: its {entry.devices} devices share {env['machine']['cores']} cores", flush=True)
            book.began({**env, "entry": _entry_env(entry, up), "load": self._load_env(experiment, entry, up)})
            if not book.answers:
                book.keep_answers(self.requests.answers(up))
            self.requests.warm_up(up, at_once=2 * entry.devices, count=WARM_UP * entry.devices)
            for run in book.missing(experiment.runs(entry)):
                self._run(experiment, book, up, run)

    def _run(self, experiment: Experiment, book: Book, up: Up, run: Planned) -> None:
        """One rate, kept where it came to its end with every stage alive."""
        load = round(os.getloadavg()[0], 2)
        with (
            RowsFile(book.folder / ROWS, append=True) as rows,
            Sampler(up.look, book.folder / BATCHES, run.label) as sampler,
        ):
            keeping = _Keeping(rows)
            sweep = Sweep(
                up.target,
                self.requests.of_run(up.model, run),
                self.judged.plan(experiment, book.entry, run),
                keep=keeping.keep,
                traces=up.traces,
                phases=book.folder / PHASES if up.traces else None,
            )
            found = sweep.rates([run.arrivals])
        if keeping.fault is not None:
            raise keeping.fault
        if found.signal:
            raise KeyboardInterrupt if found.signal == signal.SIGINT else SystemExit(128 + found.signal)
        if sampler.died:
            who = "; ".join(f"{name}: {why}" for name, why in sampler.died.items())
            raise StageError(f"lost during {run.label}, which is to be measured again: {who}", stage=book.entry.name)
        if found.over:
            raise StageError(f"{run.label}: {found.over}", stage=book.entry.name)
        self._keep(book, run, found, load)

    def _keep(self, book: Book, run: Planned, found: Found, load: float) -> None:
        (row,) = found.rows
        said = {"rate": run.rate, "rate_rps": run.rate_rps, "devices": book.entry.devices, "load_average_1min": load}
        book.keep({**row, **said, "number": run.number, "repeated_requests": self.requests.repeat(run)}, found.figures)

    @contextlib.contextmanager
    def _up(self, entry: Entry) -> Iterator[Up]:
        blueprint = self._blueprint(entry)
        if entry.how is How.VLLM:
            with plain_vllm(entry, blueprint) as up:
                yield up
            return
        with served(entry.layout, (*self.words, *entry.flags), name=entry.name) as launch:
            up = Up(
                target=Target(launch.url, {"x-epd-explain": "1"}),
                model=launch.model,
                ready_s=launch.ready_s,
                look=partial(status_table, launch.url),
                traces=launch.traces,
                shared_cores=blueprint.cores is not None and blueprint.cores.oversubscribed,
            )
            if entry.how is How.LAYOUT:
                yield up
                return
            with over(entry, self.scripts[entry.how], up, launch.stages) as rival:
                yield rival

    def _blueprint(self, entry: Entry) -> Blueprint:
        flags = () if entry.how is How.VLLM else entry.flags
        return draw(serve_config([*self.words, "--layout", entry.layout, *flags]))

    def _load_env(self, experiment: Experiment, entry: Entry, up: Up) -> dict[str, Any]:
        """As `epd-bench load` records it."""
        return {
            "url": [str(server.endpoint) for server in up.target.servers],
            "model": up.model,
            "workload": experiment.workload,
            "seed": experiment.seed,
            "devices": entry.devices,
            "slos": [str(slo) for slo in experiment.slos],
            "client_on_the_servers_host": True,
        }


def _entry_env(entry: Entry, up: Up) -> dict[str, Any]:
    plain = entry.to_json()
    return {**plain, "ready_s": round(up.ready_s, 2), "devices_share_cores": up.shared_cores}


class _Keeping:
    """Writes rows down, and remembers why it could not: a full disk ends everything, not one entry."""

    def __init__(self, rows: RowsFile) -> None:
        self.fault: ConfigError | None = None
        self._rows = rows

    def keep(self, row: Row) -> None:
        try:
            self._rows.keep(row)
        except ConfigError as error:
            self.fault = error
            raise
