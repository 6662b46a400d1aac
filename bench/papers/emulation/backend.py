"""Deployments of `epd-bench layouts` by emulation: their runs as a measurement would keep them, in virtual time.

Times in rows count from the run's begin. There is no sender that could come late and no stage that could die; what is
judged besides is judged by the same code as a measured run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.analysis.page import require
from bench.clients.bodies import sent_by
from bench.clients.measure import judged
from bench.clients.records import RecordsFile
from bench.papers.devices import openpangu_vl_7b_910b
from bench.papers.devices.stage import StageDevice
from bench.papers.emulation.deployment import check_emulated, emulate
from bench.papers.emulation.table5 import check
from bench.phases import breakdown, phase_figures, request_phases
from bench.record import environment, flatten
from bench.sweep.deployments import ServedBy
from bench.sweep.experiment import Experiment, PlannedRun
from bench.sweep.store import BATCHES, PHASES, ROWS, ResultStore
from bench.workloads.arrivals import ClosedLoop, with_arrivals
from bench.workloads.workload import Workload
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse

DEVICES: Mapping[str, tuple[StageDevice, Mapping[str, StageDevice]]] = {
    "910b": (openpangu_vl_7b_910b.DEVICE, openpangu_vl_7b_910b.READINGS)
}
"""Device and other readings of its sources, by the name that `--emulate` takes."""


def emulated(name: str, requests: Workload, arguments: argparse.Namespace, argv: Sequence[str]) -> Emulation:
    """Returns the backend of a device of `DEVICES` (`bench/sweep/backend.py`). Raises ConfigError without SciPy."""
    require(["scipy"])
    return Emulation(name, requests, argv, arguments)


@dataclass(frozen=True)
class Emulation:
    """The backend of emulated deployments.

    Attributes:
        name: of the device, of which every layout has as many as it needs.
        requests: the workload. argv, arguments: of the command, for the record.
    """

    name: str
    requests: Workload
    argv: Sequence[str] = ()
    arguments: argparse.Namespace | None = None

    @property
    def device(self) -> StageDevice:
        return DEVICES[self.name][0]

    @property
    def kind(self) -> str:
        """What the figures are."""
        return f"emulated {self.device.name} (bench/papers/devices/, virtual clock)"

    @property
    def served(self) -> Mapping[str, Any]:
        """Device and constants, for the record."""
        return {"emulate": self.name, "constants": asdict(self.device)}

    def check(self, experiment: Experiment) -> None:
        """Raises ConfigError where a deployment has stages of several devices, or a run is not known beforehand."""
        for deployment in experiment.deployments:
            if deployment.served_by is not ServedBy.LAYOUT:
                raise ConfigError(
                    f"{deployment.name} cannot be emulated: leave --baselines and --peer-* out", param="--emulate"
                )
            check_emulated(parse(deployment.layout))
            if any(isinstance(run.arrivals, ClosedLoop) for run in experiment.runs(deployment)):
                raise ConfigError("a closed loop cannot be emulated: give rates", param="--arrivals")

    def measure(self, experiment: Experiment, store: ResultStore) -> None:
        """Emulate the missing runs, each kept as it ends. Raises ConfigError where nothing more can be kept."""
        about = {**store.deployment.to_json(), "ready_s": 0.0, "constants": asdict(self.device)}
        store.begin({**environment(self.argv, experiment.kind, self.arguments), "deployment": about})
        for run in store.missing(experiment):
            self._run(experiment, store, run)

    def against_paper(self, *, quick: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Print the check against Table 5. Returns its figures and rows."""
        return check(*DEVICES[self.name], quick=quick)

    def _run(self, experiment: Experiment, store: ResultStore, run: PlannedRun) -> None:
        deployment = store.deployment
        plan = experiment.plan(deployment, run)
        dated = with_arrivals(self.requests.seeded(plan.seed).endless(), plan.arrivals, plan.seed)
        emulation = emulate(parse(deployment.layout), self.device, sent_by(dated, plan), run.label)
        with RecordsFile(store.folder / ROWS, append=True) as rows:
            for row in emulation.run.rows:
                rows.keep(row)
        _append(store, PHASES, emulation.phases)
        _append(store, BATCHES, emulation.batches)
        measured = judged(emulation.run, plan)
        phases = breakdown(map(request_phases, emulation.phases))
        figures = {**measured.figures, **({"phases": phase_figures(phases)} if phases else {})}
        about = {"rate": run.rate, "rate_rps": run.rate_rps, "devices": deployment.devices, "number": run.number}
        store.keep({**measured.row(), **about}, flatten({run.label: figures}))


def _append(store: ResultStore, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
    try:
        with (store.folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    except OSError as error:
        raise ConfigError(f"--out: {store.folder / name}: {error.strerror}", param="--out") from error
