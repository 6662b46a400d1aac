"""What else EPD-Serve prints of these deployments, beside what the same constants give: how far to trust the model.

None of it is Table 5. What a constant was solved from is marked: agreement there is no finding.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.client.run import Run
from bench.client.slo import Slo
from bench.devices.serving import Serving
from bench.emulation.loads import Loads
from bench.emulation.serve import emulate
from bench.emulation.table5 import OUTPUT_TOKENS, SLO
from epd_serve.layout_parser import parse

STRICT = Slo(800, 30)  # §4.4


@dataclass(frozen=True)
class Said:
    """A number of the paper.

    Attributes:
        low, high: as printed; one number where they are equal.
        used: a constant was solved from it.
    """

    name: str
    source: str
    low: float
    high: float
    emulated: float
    used: bool = False


def said(device: Serving, loads: Loads, seeds: Sequence[int]) -> list[Said]:
    """All of it; each number the mean of `seeds`."""

    def runs(layout: str, rate_rps: float) -> list[Run]:
        parsed = parse(layout)
        return [emulate(parsed, device, loads.at(rate_rps, seed), "").run for seed in seeds]

    def change(of: list[Run], to: list[Run], figure: Callable[[Run], float]) -> float:
        return 100 * (_mean(of, figure) / _mean(to, figure) - 1)

    two, three = runs("E-P-D", 6), runs("E-P-D", 9)
    tp1, e_pd = runs("TP1", 12), runs("(E-PD)", 12)
    ep_d, e_p_d, e_d_p = runs("EP-D", 24), runs("(E-P)-D", 24), runs("(E-D)-P", 24)
    slow_ep, slow_e_p = runs("EP-D", 8), runs("(E-P)-D", 8)
    tpots = [change(one, tp1, tpot_ms) for one in (ep_d, e_p_d, e_d_p)]
    effective = [_mean(one, _effective) for one in (e_p_d, ep_d)]
    more = 100 * (effective[0] / effective[1] - 1) if effective[1] else float("inf")
    table_2, per_npu = "Table 2, EPD-Serve", "12 req/s per NPU"
    return [
        Said("E-P-D, 2 req/s per NPU: TTFT, ms", table_2, 481.38, 481.38, _mean(two, ttft_ms), used=True),
        Said("E-P-D, 3 req/s per NPU: TTFT, ms", table_2, 650.51, 650.51, _mean(three, ttft_ms)),
        Said("E-P-D, 2 req/s per NPU: TPOT, ms", "Table 2, all rows", 38.20, 39.42, _mean(two, tpot_ms), used=True),
        Said("E-P-D, 3 req/s per NPU: TPOT, ms", "Table 2, all rows", 41.50, 43.95, _mean(three, tpot_ms), used=True),
        Said(f"(E-PD) over TP1, {per_npu}: throughput, %", "§4.3", 12.87, 14.88, change(e_pd, tp1, tokens_per_s), True),
        Said(f"(E-PD) over TP1, {per_npu}: TTFT, %", "§4.3", -3.25, -2.7, change(e_pd, tp1, ttft_ms)),
        Said(f"(E-PD) over TP1, {per_npu}: TPOT, %", "§4.3", -70.39, -69.58, change(e_pd, tp1, tpot_ms)),
        Said(f"D apart over TP1, {per_npu}: TPOT, %, least", "§4.4", -79.99, -79.99, max(tpots)),
        Said(f"D apart over TP1, {per_npu}: TPOT, %, most", "§4.4", -93.31, -93.31, min(tpots)),
        Said(f"(E-D)-P over EP-D, {per_npu}: TTFT, %", "§4.4", -54.56, -39.22, change(e_d_p, ep_d, ttft_ms)),
        Said(f"(E-P)-D over EP-D, {per_npu}: effective throughput, %", "§4.4", 57.37, 69.48, more),
        Said("EP-D, 4 req/s per NPU: attainment of 800:30, %", "§4.4", 59.57, 59.57, _mean(slow_ep, _strict)),
        Said("(E-P)-D, 4 req/s per NPU: attainment of 800:30, %", "§4.4", 84.96, 84.96, _mean(slow_e_p, _strict)),
    ]


def ttft_ms(run: Run) -> float:
    return statistics.fmean(row.ttft_s or 0.0 for row in run.rows) * 1e3


def tpot_ms(run: Run) -> float:
    return statistics.fmean(row.tpot_s or 0.0 for row in run.rows) * 1e3


def tokens_per_s(run: Run) -> float:
    """Of the whole run."""
    return len(run.rows) * OUTPUT_TOKENS / run.ended_s


def _effective(run: Run) -> float:
    return sum(map(SLO.attained, run.rows)) * OUTPUT_TOKENS / run.ended_s


def _strict(run: Run) -> float:
    return 100 * statistics.fmean(map(STRICT.attained, run.rows))


def _mean(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    return statistics.fmean(map(figure, runs))
