"""Experiments that are asked for in tests, and a backend that starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.sweep.experiment import Experiment, deployments
from bench.sweep.store import ROWS, ResultStore

ENV: dict[str, Any] = {"kind": "simulated", "command": "epd-bench layouts", "machine": {"load_average_1min": 0.1}}


def experiment(layouts: str = "TP1x2,(E-P)-D", rates: tuple[float, ...] = (1.0, 2.0), **more: Any) -> Experiment:
    return Experiment(
        **{"kind": "simulated", "workload": "pope-like", "rates": rates, "deployments": deployments(layouts), **more}
    )


def run_row(label: str, *, valid: bool = True) -> dict[str, Any]:
    why = [] if valid else ["too few"]
    rate = float(label.split()[0])
    return {"run": label, "valid": valid, "objections": why, "grows": "", "rate": rate, "rate_rps": rate}


class Scripted:
    """A backend whose runs cost nothing. By (deployment, label) an event happens instead of a run."""

    kind = "simulated"
    served: Mapping[str, Any] = {}

    def __init__(self, events: Mapping[tuple[str, str], Callable[[], None]] | None = None) -> None:
        self.events = dict(events or {})
        self.measured: list[tuple[str, str]] = []

    def check(self, experiment: Experiment) -> None:
        pass

    def measure(self, experiment: Experiment, store: ResultStore) -> None:
        name = store.deployment.name
        store.begin({**ENV, "deployment": {"name": name, "ready_s": 1.0}})
        store.keep_answers([[1, 2], [3]])
        for run in store.missing(experiment):
            with (store.folder / ROWS).open("a") as rows:
                rows.write(f'{{"run": "{run.label}"}}\n')
            if (event := self.events.get((name, run.label))) is not None:
                event()
            self.measured.append((name, run.label))
            store.keep(run_row(run.label), {f"{run.label}/ok": 1.0})
