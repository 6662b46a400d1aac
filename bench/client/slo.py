"""Service-level objectives of a request: time to first token, and time per token after it. Pure.

A request attains an objective when it was answered whole within both bounds. Whatever else became of it, but that its
own client left, is a miss: an objective that only counts survivors flatters who drops the slow ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.client.row import Outcome, Row
from epd_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in milliseconds, each inclusive. A request of one token has no time per token to miss."""

    ttft_ms: float
    tpot_ms: float

    def __str__(self) -> str:
        return f"{self.ttft_ms:g}:{self.tpot_ms:g}"

    def attained(self, row: Row) -> bool:
        ttft_s, tpot_s = row.ttft_s, row.tpot_s
        if not row.ok or ttft_s is None:
            return False
        return ttft_s * 1e3 <= self.ttft_ms and (tpot_s is None or tpot_s * 1e3 <= self.tpot_ms)


PAPER = (Slo(2000, 50), Slo(2000, 80), Slo(800, 30))
"""EPD-Serve §4: TTFT within 2 s with 50 or 80 ms per token, and the strict one."""


def parse_slos(text: str) -> tuple[Slo, ...]:
    """`TTFT:TPOT` in milliseconds, several with commas between.

    Raises:
        ConfigError: not of that form.
    """
    found = []
    for word in text.split(","):
        ttft, colon, tpot = word.partition(":")
        try:
            slo = Slo(float(ttft), float(tpot))
        except ValueError:
            colon = ""
        if not colon or not (0 < slo.ttft_ms < float("inf") and 0 < slo.tpot_ms < float("inf")):
            raise ConfigError(f"--slo {word!r}: write TTFT:TPOT in milliseconds, as 2000:50", param="--slo")
        found.append(slo)
    return tuple(dict.fromkeys(found))


def counted(rows: Iterable[Row]) -> list[Row]:
    """Those that an objective is about: all but requests whose client left."""
    return [row for row in rows if row.outcome is not Outcome.CANCELLED]


def own_attained(row: Row) -> bool | None:
    """Whether the request attained the objective that it brought; None where it brought none."""
    if row.slo_ttft_ms is None and row.slo_tpot_ms is None:
        return None
    unbounded = float("inf")
    return Slo(row.slo_ttft_ms or unbounded, row.slo_tpot_ms or unbounded).attained(row)
