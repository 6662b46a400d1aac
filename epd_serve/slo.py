"""How a request's objectives are judged: its time to first token, and the gaps between its tokens. Pure.

`p90`: nine in ten of a request's own gaps are within the limit (HydraInfer §5); `p99` and any other `pNN` likewise
(ModServe); `mean`: the time per token (EPD-Serve). A gap is between two events with content. Events read at once share
the wait before them, since nobody knows when each was due; one event that carries several tokens is one gap, which its
reader waited for.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from epd_serve.errors import ConfigError

MEAN = "mean"
JUDGE = "p90"
"""The usual one."""
_SHARE = re.compile(r"p([1-9]\d?)")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds, each inclusive. A request of one token has no gap to miss.

    Attributes:
        judge: `pNN` or `mean`.
    """

    ttft_ms: float
    tpot_ms: float
    judge: str = JUDGE

    def __post_init__(self) -> None:
        if self.judge != MEAN and not _SHARE.fullmatch(self.judge):
            raise ConfigError(f"slo: a judge of token gaps is p1 to p99, or mean, not {self.judge!r}", param="slo")

    def __str__(self) -> str:
        return f"{self.ttft_ms:g}:{self.tpot_ms:g}:{self.judge}"

    @property
    def text(self) -> str:
        """For people."""
        of = "mean TPOT" if self.judge == MEAN else f"{self.judge[1:]} % of its token gaps"
        return f"TTFT ≤ {self.ttft_ms:g} ms, {of} ≤ {self.tpot_ms:g} ms"

    def attained(self, ttft_s: float, tpot_s: float | None, gaps: int, within: int) -> bool:
        """Whether an answer that came whole attains it.

        Args:
            tpot_s: its mean; None of one token. gaps, within: how many it had, and those of them within `tpot_ms`.
        """
        if ttft_s * 1e3 > self.ttft_ms:
            return False
        if self.judge == MEAN:
            return (tpot_s or 0.0) * 1e3 <= self.tpot_ms
        return 100 * within >= int(self.judge[1:]) * gaps


class Gaps:
    """Counts the gaps of one answer while its events come.

    Attributes:
        limit_s: of a gap. count: how many there were. within: those of them within the limit.
    """

    __slots__ = ("_before_s", "count", "limit_s", "within")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.count = self.within = 0
        self._before_s: float | None = None

    def add(self, at_s: float, events: int = 1) -> None:
        """So many events with content came at once, not before those that were added."""
        if events <= 0:
            return
        if self._before_s is None:
            events -= 1
            self.within += events  # they came with the first
        elif at_s - self._before_s <= self.limit_s * events:
            self.within += events
        self.count += events
        self._before_s = at_s


def gaps_within(times_s: Iterable[float], limit_s: float) -> tuple[int, int]:
    """Of events read at these times, ascending: how many gaps there are, and how many are within the limit."""
    gaps = Gaps(limit_s)
    for at_s, events in Counter(times_s).items():  # in the order in which they came
        gaps.add(at_s, events)
    return gaps.count, gaps.within


def parse_slos(text: str) -> tuple[Slo, ...]:
    """Reads `TTFT:TPOT` in milliseconds, or `TTFT:TPOT:JUDGE` (`pNN`, `mean`), several with commas between.

    Raises:
        ConfigError: not of that form.
    """
    slos = []
    for word in text.split(","):
        try:
            ttft, tpot, *judge = word.split(":", 2)
            ttft_ms, tpot_ms = float(ttft), float(tpot)
        except ValueError:
            ttft_ms = tpot_ms = 0.0
        if not (0 < ttft_ms < math.inf and 0 < tpot_ms < math.inf):
            raise ConfigError(
                f"--slo {word!r}: write TTFT:TPOT in milliseconds, as 2000:50 or 2000:50:mean", param="--slo"
            )
        slos.append(Slo(ttft_ms, tpot_ms, *judge))
    return tuple(dict.fromkeys(slos))
