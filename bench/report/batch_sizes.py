"""How many sequences the stages ran at once, against rate, and what that did to decode (after HydraInfer v1 Fig. 6).

From `batches.jsonl`, which samples running and waiting sequences of every instance while a rate runs. HydraInfer's
figure is of a stage alone against its batch size, which nobody's traffic shows: that is `epd-bench batches`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report.experiment import Entry, Experiment, Run
from bench.report.folder import BatchSample
from bench.report.sheet import Cell, Sheet
from bench.report.style import by_entry, finish, legend, line, new_figure, nothing, scale, tidy
from bench.statistic import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGES = (("E", "encode"), ("P", "prefill"), ("D", "decode"))
"""Last letter of a role, and the panel it is drawn in: a fused instance is where its last stage is."""


@dataclass(frozen=True)
class Batch:
    """Running sequences of an instance of one role during one run, over samples and instances."""

    role: str
    samples: int
    instances: int
    mean: float
    p10: float
    p90: float
    waiting: float

    @property
    def stage(self) -> str:
        return self.role[-1:]


def batches_of(samples: Sequence[BatchSample], run: Run) -> list[Batch]:
    """A role each, in the order of the stages."""
    own = [one for one in samples if one.run == run.label]
    found = []
    for role in sorted({one.role for one in own}, key=lambda role: ("EPD".find(role[-1:]), role)):
        of_role = [one for one in own if one.role == role]
        running = [float(one.running) for one in of_role]
        found.append(
            Batch(
                role,
                len(of_role),
                len({one.instance for one in of_role}),
                statistics.fmean(running),
                percentile(running, 10),
                percentile(running, 90),
                statistics.fmean(one.waiting for one in of_role),
            )
        )
    return found


Sampled = Mapping[str, Sequence[BatchSample]]
"""By entry's name."""


def measured(experiment: Experiment, sampled: Sampled) -> list[tuple[Entry, float, Run, Batch]]:
    """One of each role, entry and rate."""
    return [
        (entry, rate, run, batch)
        for entry in experiment.entries
        for rate in experiment.measured_rates
        if (run := experiment.at(entry, rate)) is not None
        for batch in batches_of(sampled.get(entry.name, ()), run)
    ]


def sheet(experiment: Experiment, sampled: Sampled) -> Sheet:
    rows: list[tuple[Cell, ...]] = []
    for entry, rate, run, batch in measured(experiment, sampled):
        numbers: tuple[Cell, ...] = (batch.instances, batch.samples, batch.mean, batch.p10, batch.p90, batch.waiting)
        decodes = batch.stage == "D"
        itl = run.figure("itl_ms", "mean") if decodes else None
        each = run.tokens_per_s / batch.instances if decodes and run.tokens_per_s is not None else None
        rows.append((entry.name, entry.devices, rate, batch.role, *numbers, itl, each, run.valid))
    columns = (
        "deployment",
        "devices",
        experiment.rate_words,
        "role",
        "instances",
        "samples",
        "running, mean (sequences)",
        "running, P10",
        "running, P90",
        "waiting, mean (sequences)",
        "time between tokens, mean (ms)",
        "output tokens/s of an instance",
        "valid",
    )
    faint = frozenset(place for place, row in enumerate(rows) if row[-1] is False)
    note = (
        "Of one instance: samples of all instances of a role are taken together. A fused instance runs all its stages."
    )
    return Sheet("batches", "Sequences that an instance runs at once", columns, tuple(rows), note=note, faint=faint)


def draw(experiment: Experiment, sampled: Sampled, path: Path) -> None:
    """Above, running sequences against rate by stage; below, what they cost and give where tokens are decoded."""
    found = [one for one in measured(experiment, sampled) if one[2].valid]
    figure = new_figure(13.0, 8.0)
    panels = figure.subplots(2, 3, squeeze=False)
    for ax, (letter, words) in zip(panels[0], STAGES, strict=True):
        _running(ax, experiment, words, [one for one in found if one[3].stage == letter])
    decoding = [one for one in found if one[3].stage == "D"]
    for ax, (label, value) in zip(panels[1], COSTS, strict=True):
        _costs(ax, experiment, label, [(entry, batch.mean, value(run, batch)) for entry, _, run, batch in decoding])
    legend(figure, list(panels.flat), experiment)
    finish(figure, experiment, "Batch sizes by stage (mean, band P10–P90), and what they do to decode", path)


def _tokens_per_s(run: Run, batch: Batch) -> float | None:
    return None if run.tokens_per_s is None else run.tokens_per_s / batch.instances


COSTS: tuple[tuple[str, Callable[[Run, Batch], float | None]], ...] = (
    ("time between tokens, mean (ms)", lambda run, _: run.figure("itl_ms", "mean")),
    ("output tokens/s of an instance", _tokens_per_s),
    ("P99 TPOT (ms)", lambda run, _: run.figure("tpot_ms", "p99")),
)
"""What is drawn against running sequences of a decoding instance."""


def _running(ax: Axes, experiment: Experiment, words: str, found: Sequence[tuple[Entry, float, Run, Batch]]) -> None:
    roles = sorted({batch.role for *_, batch in found}, key=lambda role: (len(role), role))
    tidy(ax, experiment.rate_words, "running sequences of an instance", f"{words}: {', '.join(roles) or 'none'}")
    for entry, own in by_entry(experiment, found):
        rates = [rate for _, rate, _, _ in own]
        ax.plot(rates, [batch.mean for *_, batch in own], label=entry.known_as, **line(experiment, entry))
        low, high = ([batch.p10 for *_, batch in own], [batch.p90 for *_, batch in own])
        ax.fill_between(rates, low, high, color=line(experiment, entry)["color"], alpha=0.10, linewidth=0)
    if found:
        ax.set_ylim(0, max(1.0, *(batch.p90 for *_, batch in found)) * 1.08)
        ax.set_xticks(experiment.measured_rates, [f"{rate:g}" for rate in experiment.measured_rates])
    else:
        nothing(ax, "no instance of this stage was sampled")


def _costs(ax: Axes, experiment: Experiment, label: str, found: Sequence[tuple[Entry, float, float | None]]) -> None:
    tidy(ax, "running sequences of a decoding instance (mean)", label)
    known = [(entry, at, value) for entry, at, value in found if value is not None]
    for entry, own in by_entry(experiment, known):
        at, values = zip(*sorted((at, value) for _, at, value in own), strict=True)
        ax.plot(at, values, label=entry.known_as, **line(experiment, entry))
    if known:
        scale(ax, [value for *_, value in known], log=False)
    else:
        nothing(ax, "no decoding instance was sampled")
