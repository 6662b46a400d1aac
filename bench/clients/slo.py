"""Service-level objectives of a request: time to first token, and time per token after it. Pure.

A request attains an objective when it was answered whole within both bounds. Whatever else became of it, but that its
own client left, is a miss: an objective that only counts survivors flatters who drops the slow ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.clients.records import Outcome, RequestRecord
from epd_serve.errors import ConfigError

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in milliseconds, each inclusive. A request of one token has no time per token to miss."""

    ttft_ms: float
    tpot_ms: float

    def __str__(self) -> str:
        return f"{self.ttft_ms:g}:{self.tpot_ms:g}"

    def attained(self, record: RequestRecord) -> bool:
        if not record.ok or record.ttft_s is None:
            return False
        return record.ttft_s * 1e3 <= self.ttft_ms and (record.tpot_s or 0.0) * 1e3 <= self.tpot_ms


PAPER = (Slo(2000, 50), Slo(2000, 80), Slo(800, 30))
"""EPD-Serve §4: TTFT within 2 s with 50 or 80 ms per token, and the strict one."""


def parse_slos(text: str) -> tuple[Slo, ...]:
    """Reads `TTFT:TPOT` in milliseconds, several with commas between.

    Raises:
        ConfigError: not of that form.
    """
    slos = []
    for word in text.split(","):
        try:
            ttft_ms, tpot_ms = map(float, word.split(":"))
        except ValueError:
            ttft_ms = tpot_ms = 0.0
        if not (0 < ttft_ms < INFINITE and 0 < tpot_ms < INFINITE):
            raise ConfigError(f"--slo {word!r}: write TTFT:TPOT in milliseconds, as 2000:50", param="--slo")
        slos.append(Slo(ttft_ms, tpot_ms))
    return tuple(dict.fromkeys(slos))


def counted(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Those that an objective is about: all but requests whose client left."""
    return [record for record in records if record.outcome is not Outcome.CANCELLED]


def attainment(records: Sequence[RequestRecord], slo: Slo) -> tuple[int, int]:
    """(requests that attain it, requests that it is about)."""
    about = counted(records)
    return sum(map(slo.attained, about)), len(about)
