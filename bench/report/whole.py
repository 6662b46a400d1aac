"""Writes a report: a PNG and a CSV for each figure, a CSV for each table, and `report.html` with all of it.

Where matplotlib is missing there are no PNGs, and the page says how to get them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.client.row import Row
from bench.report import (
    about,
    batch_sizes,
    breakdown_chart,
    curves,
    deployments,
    folder,
    radar,
    ratios,
    scatter,
    style,
)
from bench.report.breakdown import Breakdown, breakdown
from bench.report.experiment import Entry, Experiment
from bench.report.page import Page, Picture, Section
from bench.report.sheet import Sheet
from bench.report.verdict import Verdict, verdict
from epd_serve.errors import ConfigError

PAGE = "report.html"
PAPER_FIGURES = {
    "attainment": "Figs. 8 and 12",
    "throughput": "Figs. 9 and 13",
    "ttft": "Figs. 10 and 14",
    "tpot": "Figs. 11 and 15",
}
RANKS = "Ranks of each deployment by rate, one panel each for TTFT, TPOT and throughput per device"
PHASES = "Stacked bars of mean milliseconds by phase, one per deployment: the time to first token, the whole request"


@dataclass(frozen=True)
class Report:
    """What was written, and what it says."""

    paths: tuple[Path, ...]
    verdict: Verdict


def write(folder_path: Path, experiment: Experiment) -> list[Path]:
    """The paths of all files of a report, written into `folder_path`.

    Raises:
        ConfigError: a file of the experiment is broken, or one of the report cannot be written.
    """
    return list(report(folder_path, experiment).paths)


def report(folder_path: Path, experiment: Experiment, rate: float | None = None) -> Report:
    """As `write`. `rate`: of Table 5 and the phases; default the highest that half of the entries have."""
    rate = deployments.chosen_rate(experiment, rate)
    rows = {entry.name: folder.rows(entry) for entry in experiment.entries}
    sampled = {entry.name: folder.batches(entry) for entry in experiment.entries}
    taken = {entry.name: _breakdowns(experiment, entry, rows[entry.name]) for entry in experiment.entries}
    compared = ratios.Compared(experiment, rows)
    against = ratios.monolith(experiment)
    to_monolith = ratios.sheet(experiment, against, compared.to(against))
    said = verdict(experiment, compared, taken, sampled)
    paper = _Paper(folder_path, experiment)
    sections = [
        *_rates(paper, experiment),
        *([_table5(paper, experiment, rate)] if rate is not None else []),
        paper.section("goodput", "Goodput", sheets=[deployments.goodput(experiment)]),
        _scatter(paper, experiment, rows),
        paper.section(
            "ranks",
            "Ranks by rate (EPD-Serve Fig. 17)",
            sheets=[radar.sheet(experiment)],
            drawn=[("ranks", RANKS, partial(radar.draw, experiment))],
        ),
        *([_phases(paper, experiment, taken, rate)] if any(taken.values()) and rate is not None else []),
        *([_batches(paper, experiment, sampled)] if any(sampled.values()) else []),
        paper.section("ratios", "Ratios to the monolith", sheets=[to_monolith]),
        paper.section("deployments", "Deployments", sheets=[about.deployed(experiment)]),
        paper.section("runs", "All runs", sheets=[deployments.runs(experiment)]),
    ]
    problems = about.problems(experiment)
    if not any(taken.values()):
        problems.append("no valid run was traced: there is no breakdown by phase")
    if not any(sampled.values()):
        problems.append("the stages were not sampled: there are no batch sizes")
    if not style.can_draw():
        problems.append(style.MISSING)
    page = Page(
        f"Layouts compared: {experiment.workload}", experiment.kind, about.facts(experiment), problems, said, sections
    )
    paper.keep(PAGE, page.html())
    return Report(tuple(paper.paths), said)


class _Paper:
    """Where files go, and which there are."""

    def __init__(self, at: Path, experiment: Experiment) -> None:
        self._at, self._experiment = at, experiment
        self._draws = style.can_draw()
        self.paths: list[Path] = []

    def section(
        self,
        anchor: str,
        title: str,
        *,
        words: Sequence[str] = (),
        sheets: Sequence[Sheet] = (),
        drawn: Sequence[tuple[str, str, Callable[[Path], None]]] = (),
        folded: bool = True,
    ) -> Section:
        """A section whose files are written. `drawn`: name, alternative text and drawing of each picture."""
        pictures = []
        for name, alt, draw in drawn if self._draws else ():
            path = self._at / f"{name}.png"
            draw(path)
            self.paths.append(path)
            pictures.append(Picture(path.read_bytes(), f"{alt}. {self._experiment.kind}."))
        for sheet in sheets:
            self.keep(f"{sheet.name}.csv", sheet.csv(self._experiment.kind))
        return Section(anchor, title, words, pictures, sheets, folded)

    def keep(self, name: str, text: str) -> None:
        path = self._at / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", param="DIR") from error
        self.paths.append(path)


def _rates(paper: _Paper, experiment: Experiment) -> list[Section]:
    count = sum(bool(entry.runs) for entry in experiment.entries)
    found = []
    for one in curves.figures(experiment):
        panels = " and ".join(measure.label for measure in one.measures)
        alt = f"Line chart of {panels} against request rate, {count} deployments; the numbers are in the table below it"
        draw = partial(curves.draw, experiment, one)
        title = f"{one.title} (EPD-Serve {PAPER_FIGURES[one.name]})"
        found.append(
            paper.section(one.name, title, sheets=[curves.sheet(experiment, one)], drawn=[(one.name, alt, draw)])
        )
    return found


def _table5(paper: _Paper, experiment: Experiment, rate: float) -> Section:
    sheet = deployments.deployments(experiment, rate, experiment.slos)
    return paper.section("table5", sheet.title, sheets=[sheet])


def _scatter(paper: _Paper, experiment: Experiment, rows: Mapping[str, Sequence[Row]]) -> Section:
    sheets, drawn = [], []
    for dots in scatter.FIGURES:
        sheets += [scatter.best_sheet(experiment, dots), scatter.sheet(experiment, rows, dots)]
        alt = f"Scatter plot of {dots.short} of every whole answer, a panel per rate; the best three are in the table"
        drawn.append((dots.name, alt, partial(scatter.draw, experiment, rows, dots)))
    return paper.section(
        "scatter", "TTFT and TPOT of all requests (EPD-Serve Fig. 16)", sheets=sheets, drawn=drawn, folded=False
    )


def _phases(
    paper: _Paper, experiment: Experiment, taken: Mapping[str, Mapping[float, Breakdown]], rate: float
) -> Section:
    draw = partial(breakdown_chart.draw, experiment, taken, rate)
    return paper.section(
        "phases",
        "Where the time goes (HydraInfer Figs. 11 and 13)",
        sheets=[breakdown_chart.sheet(experiment, taken)],
        drawn=[("phases", PHASES, draw)],
    )


def _batches(paper: _Paper, experiment: Experiment, sampled: batch_sizes.Sampled) -> Section:
    alt = "Running sequences by stage against rate, and time between tokens against running sequences"
    return paper.section(
        "batches",
        "Batch sizes (after HydraInfer Figs. 3 and 6)",
        words=["What stages ran under this traffic. A stage alone against its batch size is `epd-bench batches`."],
        sheets=[batch_sizes.sheet(experiment, sampled)],
        drawn=[("batches", alt, partial(batch_sizes.draw, experiment, sampled))],
    )


def _breakdowns(experiment: Experiment, entry: Entry, rows: Sequence[Row]) -> dict[float, Breakdown]:
    """By rate, of valid runs."""
    requests = folder.phases(entry)
    found = {}
    for rate in experiment.measured_rates:
        run = experiment.at(entry, rate)
        if run is None or not run.valid:
            continue
        own = [one for one in requests if one.run == run.label]
        if own and (one := breakdown(own, [row for row in rows if row.run == run.label])) is not None:
            found[rate] = one
    return found
