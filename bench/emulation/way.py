"""Entries of `epd-bench layouts` by emulation: fills their books as a measurement would, in virtual time.

Times in rows count from the run's begin. There is no generator that could come late and no stage that could die; what
is judged besides is judged by the same code as a measured run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.client.joined import mean_phases
from bench.client.measure import Plan, judged
from bench.client.rows_file import RowsFile
from bench.devices.serving import Serving
from bench.emulation.serve import Emulated, emulate
from bench.layouts.book import BATCHES, PHASES, ROWS, Book
from bench.layouts.entry import How
from bench.layouts.experiment import Experiment, Planned
from bench.layouts.judged import Judged
from bench.record import environment, flatten
from bench.workloads.arrivals import ClosedLoop, with_arrivals
from bench.workloads.spec import RequestSpec
from bench.workloads.workload import Workload
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.placement import check_servable


@dataclass(frozen=True)
class Emulation:
    """The `Way` of emulated deployments.

    Attributes:
        device: of which every layout has as many as it needs.
        requests: the workload. argv, asked: of this command, for the record.
    """

    device: Serving
    requests: Workload
    judged: Judged = field(default_factory=Judged)
    argv: Sequence[str] = ()
    asked: argparse.Namespace | None = None

    def check(self, experiment: Experiment) -> None:
        """Raises ConfigError where an entry is no layout of one-device stages, or a run cannot be told beforehand."""
        for entry in experiment.entries:
            if entry.how is not How.LAYOUT:
                raise ConfigError(
                    f"{entry.name} cannot be emulated: leave --baselines and --peer-* out", param="--emulate"
                )
            layout = parse(entry.layout)
            check_servable(layout)
            if any(member.tp > 1 for member in layout.members()):
                raise ConfigError(
                    f"layout {layout} has stages of several devices; an emulation knows one device each",
                    param="--layouts",
                )
            if any(isinstance(run.arrivals, ClosedLoop) for run in experiment.runs(entry)):
                raise ConfigError("a closed loop cannot be emulated: give rates", param="--arrivals")

    def measure(self, experiment: Experiment, book: Book) -> None:
        entry = book.entry
        env = environment(self.argv, experiment.kind, self.asked)
        said = {**entry.to_json(), "ready_s": 0.0, "constants": asdict(self.device)}
        book.began({**env, "entry": said})
        for run in book.missing(experiment.runs(entry)):
            self._run(experiment, book, run)

    def _run(self, experiment: Experiment, book: Book, run: Planned) -> None:
        entry = book.entry
        plan = self.judged.plan(experiment, entry, run)
        found = emulate(parse(entry.layout), self.device, self._requests(plan), run.label, details=True)
        with RowsFile(book.folder / ROWS, append=True) as rows:
            for row in found.run.rows:
                rows.keep(row)
        _append(book, found)
        measured = judged(found.run, plan)
        figures = {**measured.figures, "phases": mean_phases(found.phases)}
        said = {"rate": run.rate, "rate_rps": run.rate_rps, "devices": entry.devices, "number": run.number}
        book.keep({**measured.row(), **said}, flatten({run.label: figures}))

    def _requests(self, plan: Plan) -> list[RequestSpec]:
        """As `bench/client/source.py` makes them of a workload: those of the run, not those of another one."""
        until = float("inf") if plan.seconds is None else plan.seconds
        found: list[RequestSpec] = []
        for spec in with_arrivals(self.requests.seeded(plan.seed).endless(), plan.arrivals, plan.seed):
            if len(found) == plan.count or (spec.arrival_s or 0.0) >= until:
                break
            found.append(spec)
        return found


def _append(book: Book, found: Emulated) -> None:
    for name, lines in ((PHASES, found.phases), (BATCHES, found.batches)):
        try:
            with (book.folder / name).open("a", encoding="utf-8") as file:
                file.writelines(_lines(lines))
        except OSError as error:
            raise ConfigError(f"--out: {book.folder / name}: {error.strerror}", param="--out") from error


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    return (json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
