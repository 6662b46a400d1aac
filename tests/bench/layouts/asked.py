"""Experiments that are asked for in tests, and a way of measuring that starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.client.flags import arrivals_at
from bench.layouts.book import ROWS, Book
from bench.layouts.entry import entries
from bench.layouts.experiment import Experiment

ENV: dict[str, Any] = {"kind": "simulated", "command": "epd-bench layouts", "machine": {"load_average_1min": 0.1}}


def experiment(layouts: str = "TP1x2,(E-P)-D", rates: tuple[float, ...] = (1.0, 2.0), **more: Any) -> Experiment:
    found = {"workload": "pope-like", "entries": entries(layouts), "at": arrivals_at("poisson"), **more}
    return Experiment("simulated", rates=rates, **found)


def run_row(label: str, *, valid: bool = True) -> dict[str, Any]:
    why = [] if valid else ["too few"]
    return {"run": label, "valid": valid, "objections": why, "grows": "", "rate_rps": float(label.split()[0])}


class Scripted:
    """A `Way` whose runs cost nothing. Events by (entry, label) happen instead of a run; the others are `measured`."""

    def __init__(self, events: Mapping[tuple[str, str], Callable[[], None]] | None = None) -> None:
        self.events = dict(events or {})
        self.measured: list[tuple[str, str]] = []

    def check(self, experiment: Experiment) -> None:
        pass

    def measure(self, experiment: Experiment, book: Book) -> None:
        book.began({**ENV, "entry": {"name": book.entry.name, "ready_s": 1.0}})
        book.keep_answers([[1, 2], [3]])
        for run in book.missing(experiment.runs(book.entry)):
            with (book.folder / ROWS).open("a") as rows:
                rows.write(f'{{"run": "{run.label}"}}\n')
            if (event := self.events.get((book.entry.name, run.label))) is not None:
                event()
            self.measured.append((book.entry.name, run.label))
            book.keep(run_row(run.label), {f"{run.label}/ok": 1.0})
