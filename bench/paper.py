"""What EPD-Serve reports in Table 3: the constants of its machine (Atlas 800I A2) that our measurement borrows.

Only the scheduling latency enters a figure of ours, as the emulated P (`bench/micro/ep/prefill.py`). The rest is shown
beside our numbers to compare the shape; nothing here was measured by us.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperRow:
    """One line of Table 3.

    Attributes:
        tokens: rows of the feature, [tokens, 3584]. The paper has 529 for 640x960, where 28x28 patches would give 782.
        transfer_ms, scheduling_ms, overlap: as printed there. 1 - (729.724 - 728.109) / 729.724 is its 99.78 %.
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


HIDDEN_SIZE = 3584
TABLE_3 = (
    PaperRow("280x280", 100, 8.145, 30.803, 1.0),
    PaperRow("560x560", 400, 15.819, 42.406, 1.0),
    PaperRow("640x960", 529, 17.019, 49.549, 1.0),
    PaperRow("720p", 1196, 38.776, 81.028, 1.0),
    PaperRow("1080p", 2691, 80.771, 151.77, 1.0),
    PaperRow("4k", 16206, 729.724, 728.109, 0.9978),
)
