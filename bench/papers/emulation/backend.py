"""Entries of `epd-bench layouts` by emulation: fills their folders as a measurement would, in virtual time.

Times in rows count from the run's begin. There is no generator that could come late and no stage that could die; what
is judged besides is judged by the same code as a measured run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.clients.bodies import sent_by
from bench.clients.measure import Plan, judged
from bench.clients.records import RecordsFile
from bench.layouts.book import BATCHES, PHASES, ROWS, Book
from bench.layouts.entry import How
from bench.layouts.experiment import Experiment, Planned
from bench.layouts.judged import Judged
from bench.papers.devices.stage import StageDevice
from bench.papers.emulation.check import DEVICES, check, kind_of
from bench.papers.emulation.deployment import check_emulated, emulate
from bench.phases import mean_phases
from bench.record import environment, flatten
from bench.workloads.arrivals import ClosedLoop, with_arrivals
from bench.workloads.spec import RequestSpec
from bench.workloads.workload import Workload
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse


def backend(
    device: str,
    requests: Workload | None = None,
    limits: Judged | None = None,
    argv: Sequence[str] = (),
    arguments: argparse.Namespace | None = None,
) -> Emulation:
    """Returns the emulation on devices of that name, of which every layout has as many as it needs.

    Args:
        requests: the workload; not needed where nothing is to be measured.
        limits: of a run. argv, arguments: of the command, for the record.

    Raises:
        ConfigError: nobody knows such a device.
    """
    if device not in DEVICES:
        raise ConfigError(f"--emulate {device}: one of {', '.join(DEVICES)}", param="--emulate")
    return Emulation(device, requests, limits or Judged(), argv, arguments)


@dataclass(frozen=True)
class Emulation:
    """What `backend` returns: a way to measure the entries of an experiment."""

    name: str
    requests: Workload | None
    limits: Judged = field(default_factory=Judged)
    argv: Sequence[str] = ()
    arguments: argparse.Namespace | None = None

    @property
    def device(self) -> StageDevice:
        return DEVICES[self.name][0]

    @property
    def kind(self) -> str:
        """What the figures are."""
        return kind_of(self.device)

    @property
    def constants(self) -> dict[str, Any]:
        """The device's, for the record."""
        return asdict(self.device)

    def check(self, experiment: Experiment) -> None:
        """Raises ConfigError where an entry is no layout of one-device stages, or a run is not known beforehand."""
        for entry in experiment.entries:
            if entry.how is not How.LAYOUT:
                raise ConfigError(
                    f"{entry.name} cannot be emulated: leave --baselines and --peer-* out", param="--emulate"
                )
            check_emulated(parse(entry.layout))
            if any(isinstance(run.arrivals, ClosedLoop) for run in experiment.runs(entry)):
                raise ConfigError("a closed loop cannot be emulated: give rates", param="--arrivals")

    def measure(self, experiment: Experiment, book: Book) -> None:
        """Emulate the missing runs of the book's entry, each kept as it ends. Raises ConfigError: nothing is kept."""
        entry = {**book.entry.to_json(), "ready_s": 0.0, "constants": self.constants}
        book.began({**environment(self.argv, experiment.kind, self.arguments), "entry": entry})
        for run in book.missing(experiment.runs(book.entry)):
            self._run(experiment, book, run)

    def against_paper(self, *, quick: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Print the check against Table 5. Returns its figures and rows."""
        return check(*DEVICES[self.name], quick=quick)

    def _run(self, experiment: Experiment, book: Book, run: Planned) -> None:
        entry = book.entry
        plan = self.limits.plan(experiment, entry, run)
        emulated = emulate(parse(entry.layout), self.device, self._requests_of(plan), run.label, details=True)
        with RecordsFile(book.folder / ROWS, append=True) as rows:
            for row in emulated.run.rows:
                rows.keep(row)
        _append(book, PHASES, emulated.phases)
        _append(book, BATCHES, emulated.batches)
        measured = judged(emulated.run, plan)
        figures = {**measured.figures, "phases": mean_phases(emulated.phases)}
        about = {"rate": run.rate, "rate_rps": run.rate_rps, "devices": entry.devices, "number": run.number}
        book.keep({**measured.row(), **about}, flatten({run.label: figures}))

    def _requests_of(self, plan: Plan) -> list[RequestSpec]:
        """Returns those of the run, not those of another one."""
        assert self.requests is not None
        dated = with_arrivals(self.requests.seeded(plan.seed).endless(), plan.arrivals, plan.seed)
        return list(sent_by(dated, plan))


def _append(book: Book, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
    try:
        with (book.folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    except OSError as error:
        raise ConfigError(f"--out: {book.folder / name}: {error.strerror}", param="--out") from error
