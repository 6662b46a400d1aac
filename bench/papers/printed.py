"""EPD-Serve's Tables 2 and 3 as printed: what ours is held against.

Nothing here was measured by us. The machine is an Atlas 800I A2, the model openPangu-7B-VL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MACHINE = "openPangu-7B-VL, Atlas 800I A2, ShareGPT-4o, 2 and 3 requests/s"
HIDDEN_SIZE = 3584


class Table2Row(NamedTuple):
    """E-P-D with some of its transfer optimisations. Milliseconds, at 2 and 3 requests a second and NPU (§4.1)."""

    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]


TABLE_2: Mapping[str, Table2Row] = {
    "baseline": Table2Row((703.75, 880.22), (39.29, 42.39)),
    "prefetch": Table2Row((586.87, 688.86), (38.36, 41.5)),
    "grouped": Table2Row((590.80, 775.83), (39.42, 43.89)),
    "both": Table2Row((481.38, 650.51), (38.20, 43.95)),
}


class Table3Row(NamedTuple):
    """A feature's way from E to P.

    Attributes:
        tokens: rows of the feature, [tokens, 3584]. The paper has 529 for 640x960, where 28x28 pixels would give 782.
        overlap: as printed. 1 - (729.724 - 728.109) / 729.724 is its 99.78 %.
    """

    picture: str
    tokens: int
    transfer_ms: float
    scheduling_ms: float
    overlap: float

    @property
    def exposed_ms(self) -> float:
        """What follows from the two latencies."""
        return max(0.0, self.transfer_ms - self.scheduling_ms)


TABLE_3 = (
    Table3Row("280x280", 100, 8.145, 30.803, 1.0),
    Table3Row("560x560", 400, 15.819, 42.406, 1.0),
    Table3Row("640x960", 529, 17.019, 49.549, 1.0),
    Table3Row("720p", 1196, 38.776, 81.028, 1.0),
    Table3Row("1080p", 2691, 80.771, 151.77, 1.0),
    Table3Row("4k", 16206, 729.724, 728.109, 0.9978),
)
