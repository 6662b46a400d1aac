"""EPD-Serve's Table 5 as printed, what loads it implies, and its figures of an emulated run. Pure.

The effective throughput per NPU is the tokens of requests that attain the objective, over the run's time and the NPUs:

    per-NPU = attainment · requests a second · 64 / NPUs

so each row says at how many requests a second its run went, whatever the caption has. They differ: see `implied_rps`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from bench.client.run import Run
from bench.client.slo import Slo

OUTPUT_TOKENS = 64  # §4.1
REQUESTS = 512  # §4.1
RATE_RPS = 10.0  # Table 5's caption
SLO = Slo(2000, 50)  # §4.5


@dataclass(frozen=True)
class Row5:
    """A row of Table 5, as printed or as emulated."""

    devices: int
    ttft_ms: float
    tpot_ms: float
    attainment: float
    per_device: float

    @property
    def implied_rps(self) -> float:
        """Requests a second, of all devices, that the row's throughput and attainment imply."""
        return self.per_device * self.devices / self.attainment / OUTPUT_TOKENS


PRINTED: Mapping[str, Row5] = {
    "TP1x2": Row5(2, 658.27, 95.56, 0.0215, 13.38),
    "(E-PD)x2": Row5(2, 548.32, 62.22, 0.0313, 19.70),
    "EP-D": Row5(2, 5523.82, 27.31, 0.0820, 21.54),
    "(E-P)-D": Row5(2, 2386.85, 28.40, 0.2617, 77.36),
    "(E-D)-P": Row5(2, 651.86, 50.71, 0.2266, 69.18),
    "E-P-D": Row5(3, 557.89, 28.92, 0.9434, 192.70),
}

METRICS: Mapping[str, str] = {
    "per_device": "effective tokens/s per device",
    "attainment": "SLO attainment",
    "ttft_ms": "mean TTFT, ms",
    "tpot_ms": "mean TPOT, ms",
}
"""Columns of the table by attribute of `Row5`."""


def readings() -> Mapping[str, Mapping[str, float]]:
    """Requests a second by layout, for each way to read under which load the rows were measured.

    `total`: 10 for each layout, as the caption says. `implied`: what each row implies. `monoliths`: 10 for each, but 10
    per device where a device is a whole deployment: what the implied ones look like before queues held them up.
    """
    return {
        "total": dict.fromkeys(PRINTED, RATE_RPS),
        "implied": {name: row.implied_rps for name, row in PRINTED.items()},
        "monoliths": {name: RATE_RPS * (row.devices if name.endswith("x2") else 1) for name, row in PRINTED.items()},
    }


def row5(run: Run, devices: int) -> Row5:
    """The row of a run in which every request was answered. Means are of all requests, time is from the run's begin to
    its last token: the printed attainments are multiples of 1/512, so nothing was left out as warm-up."""
    assert run.rows and all(row.ok for row in run.rows)
    attained = [row for row in run.rows if SLO.attained(row)]
    return Row5(
        devices,
        statistics.fmean(row.ttft_s or 0.0 for row in run.rows) * 1e3,
        statistics.fmean(row.tpot_s or 0.0 for row in run.rows) * 1e3,
        len(attained) / len(run.rows),
        sum(row.output_tokens for row in attained) / (run.ended_s - run.begun_s) / devices,
    )


def mean_row(rows: list[Row5]) -> Row5:
    """Of several seeds."""
    return Row5(
        rows[0].devices,
        *(statistics.fmean(getattr(row, name) for row in rows) for name in ("ttft_ms", "tpot_ms")),
        *(statistics.fmean(getattr(row, name) for row in rows) for name in ("attainment", "per_device")),
    )
