"""What an experiment of `epd-bench layouts` found, as types: entries (layouts and baselines), and their runs. Pure.

Owns the words that a report needs of it: which kind of measurement, which rate a run stands for, what is missing.
Reading it from a folder is `bench/report/folder.py`. Entries and runs are equal to themselves alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.client.slo import Slo

_RATE = re.compile(r"^([\d.]+(?:e[+-]?\d+)?) rps")
SAME_RATE = 1e-6
"""Relative difference below which two rates are one: a rate per device went through a division."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run of an entry: a rate (or a concurrency), what it gave, and whether that counts.

    Attributes:
        label: as in rows and figures: `4 rps`, `4 rps (2)` of one that was measured again, `16 at once`.
        rate_rps: of all devices together; None where the run has no rate.
        valid: it says something about the server; else `objections` says why not.
        grows: why it is no steady state, else "".
        figures: nested, as `bench/client/metrics.py` names them.
    """

    label: str
    rate_rps: float | None
    valid: bool
    objections: tuple[str, ...]
    grows: str
    figures: Mapping[str, Any]

    def figure(self, *path: str) -> float | None:
        """A number by its nested name: `figure("ttft_ms", "p99")`; None where there is none."""
        found: Any = self.figures
        for name in path:
            if not isinstance(found, Mapping) or name not in found:
                return None
            found = found[name]
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            return None
        return float(found)

    def attainment(self, slo: Slo) -> float | None:
        """Share of requests within `slo`, 0 to 1."""
        return self.figure(f"slo_{slo}", "attainment")

    def effective_tokens_per_s(self, slo: Slo) -> float | None:
        """Output tokens a second of requests within `slo`, of all devices."""
        return self.figure(f"slo_{slo}", "effective_tokens_per_s")

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens a second, of all devices."""
        return self.figure("output_tokens_per_s")


@dataclass(frozen=True, eq=False)
class Entry:
    """A layout or a baseline that was served, or was to be.

    Attributes:
        devices: that it occupies. flags: with which it was served. folder: of its files; None where it has none.
        env: of its result (`bench/record.py`), empty where it has none. runs: in the order measured.
        figures: flattened, as its result has them.
    """

    name: str
    layout: str
    devices: int
    baseline: bool = False
    flags: tuple[str, ...] = ()
    folder: Path | None = None
    env: Mapping[str, Any] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def known_as(self) -> str:
        """With its device count, as every legend has it."""
        return f"{self.name}, {self.devices} {'device' if self.devices == 1 else 'devices'}"

    @property
    def ready_s(self) -> float | None:
        """From its start until it was ready."""
        found = self.env.get("entry", {}).get("ready_s")
        return float(found) if isinstance(found, int | float) else None


@dataclass(frozen=True)
class Experiment:
    """What was asked (`asked`: the whole of experiment.json), and what there is of it.

    Attributes:
        kind: `real`, `simulated` or `emulated …`; every figure says it.
        rates: as asked; total requests a second, or per device where `per_device`.
        problems: what is missing, in sentences.
    """

    folder: Path
    kind: str
    workload: str
    rates: tuple[float, ...]
    per_device: bool
    slos: tuple[Slo, ...]
    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def real(self) -> bool:
        """Only what is real can win."""
        return self.kind.split()[:1] == ["real"]

    @property
    def rate_words(self) -> str:
        """The axis of rates."""
        return f"request rate (req/s{' per device' if self.per_device else ''})"

    def rate(self, entry: Entry, run: Run) -> float | None:
        """The rate that `run` stands for, in the terms in which rates were asked; None where it has none."""
        if run.rate_rps is None:
            return None
        rate = run.rate_rps / entry.devices if self.per_device else run.rate_rps
        near = [asked for asked in self.rates if math.isclose(asked, rate, rel_tol=SAME_RATE)]
        return near[0] if near else rate

    def at(self, entry: Entry, rate: float) -> Run | None:
        """The entry's valid run at `rate`; of several the last, of none valid the last that is not."""
        found = [run for run in entry.runs if self.rate(entry, run) == rate]
        return next(iter([run for run in reversed(found) if run.valid] or reversed(found)), None)

    @cached_property
    def measured_rates(self) -> tuple[float, ...]:
        """All rates of which any entry has a run, ascending."""
        return tuple(sorted({rate for entry, run in self.all_runs() if (rate := self.rate(entry, run)) is not None}))

    def all_runs(self) -> Iterator[tuple[Entry, Run]]:
        for entry in self.entries:
            for run in entry.runs:
                yield entry, run

    def invalid(self) -> Sequence[tuple[Entry, Run]]:
        """Runs that say nothing about the server: shown as such, and left out of every rank."""
        return [(entry, run) for entry, run in self.all_runs() if not run.valid]


def rate_of(label: str) -> float | None:
    """Requests a second of a run's label; None of a closed loop's or a trace's."""
    found = _RATE.match(label)
    return float(found[1]) if found else None
