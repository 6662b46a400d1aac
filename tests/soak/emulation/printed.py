"""EPD-Serve's Tables 4 and 5 as printed: what emulations are held against, and what their constants are solved from.

Nothing here was measured by us. The machine is an Atlas 800I A2, the model openPangu-7B-VL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

OUTPUT_TOKENS = 64  # §4.1: "the output sequence length is uniformly fixed to 64 tokens in all experiments"
REQUESTS = 512  # §4.1
TABLE_2_RATES = (2, 3)
"""Requests a second of each NPU (§4.1), of which E-P-D has three."""


class Table4Row(NamedTuple):
    """KV from P to D. `bandwidth_gb_per_s` in the paper's GB."""

    kv_ms: float
    exposed_ms: float
    prefill_ms: float
    overlap: float
    bandwidth_gb_per_s: float


TABLE_4_CONCURRENCY = 16  # §4.2.2: "at input sequence lengths of 1024 and 2048 tokens, with a concurrency of 16"
TABLE_4_LAYERWISE: Mapping[int, Table4Row] = {
    1024: Table4Row(1127.45, 955.24, 6793.50, 0.1527, 7.98),
    2048: Table4Row(1688.40, 1264.87, 14349.47, 0.2508, 10.66),
}
TABLE_4_GROUPED: Mapping[int, Table4Row] = {
    1024: Table4Row(715.53, 8.76, 6610.57, 0.9878, 12.58),
    2048: Table4Row(1536.49, 1.16, 14261.21, 0.9992, 11.71),
}
"""Both by prompt tokens."""


class Table5Row(NamedTuple):
    """A layout under load, as printed or as emulated.

    Attributes:
        attainment: share of the requests within TTFT 2 s and TPOT 50 ms (§4.5).
        per_device: tokens a second and device of those requests.
    """

    devices: int
    ttft_ms: float
    tpot_ms: float
    attainment: float
    per_device: float

    @property
    def implied_rps(self) -> float:
        """Requests a second, of all devices, that throughput and attainment imply, whatever the caption says.

        per_device = attainment · requests a second · 64 / devices.
        """
        return self.per_device * self.devices / self.attainment / OUTPUT_TOKENS


TABLE_5_RPS = 10.0  # its caption
TABLE_5: Mapping[str, Table5Row] = {
    "TP1x2": Table5Row(2, 658.27, 95.56, 0.0215, 13.38),
    "(E-PD)x2": Table5Row(2, 548.32, 62.22, 0.0313, 19.70),
    "EP-D": Table5Row(2, 5523.82, 27.31, 0.0820, 21.54),
    "(E-P)-D": Table5Row(2, 2386.85, 28.40, 0.2617, 77.36),
    "(E-D)-P": Table5Row(2, 651.86, 50.71, 0.2266, 69.18),
    "E-P-D": Table5Row(3, 557.89, 28.92, 0.9434, 192.70),
}


class Table2Row(NamedTuple):
    """E-P-D with some of its optimisations, as printed: milliseconds at 2 and 3 requests a second and NPU (§4.1)."""

    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]


TABLE_2: Mapping[str, Table2Row] = {
    "baseline": Table2Row((703.75, 880.22), (39.29, 42.39)),
    "prefetch": Table2Row((586.87, 688.86), (38.36, 41.5)),
    "grouped": Table2Row((590.80, 775.83), (39.42, 43.89)),
    "both": Table2Row((481.38, 650.51), (38.20, 43.95)),
}
