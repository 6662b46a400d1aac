"""The figures of a run of the load generator, from its requests, under any weights: what is resampled. Pure.

Latencies and attainment are resampled over requests; throughput over slices of the window, since tokens of one request
say nothing of how long others took. A slice is at least as long as a request takes, so that slices hardly share any.
Each figure is first computed from the requests as they are: one that does not come out as recorded has no interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bench.client.row import Outcome, Row
from bench.client.slo import Slo
from bench.compare.bootstrap import LEAST_BEYOND, Values, Weights, percentiles, share, whole
from bench.statistic import percentile

Key = tuple[str, int]
"""Which request: of the workload, and which of the run."""

TOLERANCE = 2e-3
"""By which a figure may differ from its record: windows are recorded in whole milliseconds."""
MOST_SLICES, LEAST_SLICES = 40, 8
_SPREAD = re.compile(r"(ttft|tpot|itl|e2e)_ms/(mean|p(\d+))")
_SLO = re.compile(r"slo_([\d.e+]+):([\d.e+]+)/(attainment|effective_tokens_per_s(?:_per_device)?)")


@dataclass(frozen=True)
class Requests:
    """The requests of one run, in the order of `keys`; those that it lacks are None.

    Attributes:
        begin_s, end_s: the window, CLOCK_MONOTONIC.
        devices: that served it.
    """

    rows: tuple[Row | None, ...]
    begin_s: float
    end_s: float
    devices: int | None

    @cached_property
    def counted(self) -> list[tuple[int, Row]]:
        """(place, request) of those due in the window."""
        return [
            (at, row) for at, row in enumerate(self.rows) if row is not None and self.begin_s <= row.due_s <= self.end_s
        ]

    def figure(self, name: str, weights: Weights) -> Values | None:
        """The figure of each resample; None where requests do not give one of that name."""
        if (found := _SPREAD.fullmatch(name)) is not None:
            values, owners = self._values(found[1])
            if found[3] is None:
                return share(weights[:, owners], values, np.ones(len(values))) if len(values) else None
            percent = int(found[3])
            if len({int(one) for one in owners}) * (1 - percent / 100) < LEAST_BEYOND:
                return None
            return percentiles(weights, values, owners, (percent,))[0]
        if (found := _SLO.fullmatch(name)) is not None and found[3] == "attainment":
            slo = Slo(float(found[1]), float(found[2]))
            about, met = np.zeros(len(self.rows)), np.zeros(len(self.rows))
            for at, row in self.counted:
                about[at] = row.outcome is not Outcome.CANCELLED
                met[at] = about[at] and slo.attained(row)
            return share(weights, met, about)
        return None

    def sliced(self, name: str, slices: int) -> Values | None:
        """The figure, as a rate within each of so many slices of the window; None where it is none of a throughput."""
        wanted: Callable[[Row], bool] | None = None
        devices = 1
        if name == "output_tokens_per_s":
            wanted = _any
        elif (found := _SLO.fullmatch(name)) is not None and found[3].startswith("effective"):
            wanted = Slo(float(found[1]), float(found[2])).attained
            devices = (self.devices or 1) if found[3].endswith("per_device") else 1
        elif name == "answered_rps":
            return self._ended(slices)
        if wanted is None:
            return None
        edges = np.linspace(self.begin_s, self.end_s, slices + 1)
        rows = [row for row in self.rows if row is not None and row.token_s and wanted(row)]
        times = np.asarray([at for row in rows for at in row.token_s])
        each = np.asarray([row.output_tokens / len(row.token_s) for row in rows for _ in row.token_s])
        tokens, _ = np.histogram(times, edges, weights=each)
        return tokens / ((self.end_s - self.begin_s) / slices) / devices

    @cached_property
    def slices(self) -> int:
        """As many as are no shorter than nine in ten requests took; 0 where that is too few to tell anything."""
        took = [row.e2e_s for _, row in self.counted if row.ok]
        if not took or self.end_s <= self.begin_s:
            return 0
        found = min(MOST_SLICES, int((self.end_s - self.begin_s) / max(percentile(took, 90), 1e-6)))
        return found if found >= LEAST_SLICES else 0

    def _ended(self, slices: int) -> Values:
        edges = np.linspace(self.begin_s, self.end_s, slices + 1)
        ended = np.asarray([row.ended_s for row in self.rows if row is not None and row.ok])
        counts, _ = np.histogram(ended, edges)
        return counts / ((self.end_s - self.begin_s) / slices)

    def _values(self, kind: str) -> tuple[Values, np.typing.NDArray[np.int64]]:
        """Milliseconds of whole answers, and whose each is."""
        values: list[float] = []
        owners: list[int] = []
        for at, row in self.counted:
            if not row.ok:
                continue
            own = row.itl_s if kind == "itl" else [getattr(row, f"{kind}_s")]
            known = [one * 1e3 for one in own if one is not None]
            values += known
            owners += [at] * len(known)
        return np.asarray(values, dtype=np.float64), np.asarray(owners, dtype=np.int64)


def requests_of(rows: Sequence[Row], window_s: float, devices: int | None, keys: Sequence[Key]) -> Requests:
    """Of a run whose window was so long and ended when its last request was due."""
    by_key = {key_of(row): row for row in rows}
    end_s = max(row.due_s for row in rows)
    rounding_s = 0.0005
    return Requests(tuple(by_key.get(key) for key in keys), end_s - window_s - rounding_s, end_s, devices)


def key_of(row: Row) -> Key:
    return row.spec, row.n


def gives(found: Requests, name: str, recorded: float) -> bool:
    """The requests as they are have that figure, as far as its record is exact."""
    values = found.figure(name, whole(len(found.rows)))
    if values is None:
        slices = found.sliced(name, 1)
        values = slices if slices is not None else None
    return values is not None and bool(abs(float(values[0]) - recorded) <= TOLERANCE * abs(recorded) + 1e-4)


def window_s(row: Mapping[str, Any]) -> float:
    """Of a run, as its row in the result says."""
    return float(row["window_s"])


def _any(row: Row) -> bool:
    return True
