"""Service-level objectives of a request, TTFT and TPOT, and goodput: the highest rate at which a share attains one.

A request attains an objective when it was answered whole within both bounds. Whatever else became of it, but that its
own client left, is a miss: an objective that only counts survivors flatters who drops the slow ones.

In the search for the goodput a probe's attainment is a sample, so a rate counts as decided when Wilson's interval lies
on one side of the target; until then it is probed again and the counts are pooled, `repeats` times at most. A rate at
which more and more requests wait is a miss however short the run was: nobody could keep it up. All of it is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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


CONFIDENCE_Z = 1.645
"""Of the interval: 90 % between both sides."""


@dataclass(slots=True)
class Probed:
    """A rate, and what all its probes found together."""

    rate_rps: float
    attained: int = 0
    about: int = 0
    runs: int = 0
    steady: bool = True

    def add(self, attained: int, about: int, steady: bool) -> None:
        """What a probe found."""
        self.attained += attained
        self.about += about
        self.runs += 1
        self.steady = self.steady and steady

    @property
    def attainment(self) -> float:
        return self.attained / self.about if self.about else 0.0

    def meets(self, target: float) -> bool:
        return self.steady and self.attainment >= target

    def decided(self, target: float) -> bool:
        low, high = wilson(self.attained, self.about)
        return not self.steady or low >= target or high < target


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a search found.

    Attributes:
        rate_rps: the highest rate that meets the target; 0 where none does.
        missed_rps: the lowest that does not; None where even the highest allowed one meets it.
        sure: both are decided beyond chance. probed: all rates that were tried, ascending.
    """

    rate_rps: float
    missed_rps: float | None
    sure: bool
    probed: tuple[Probed, ...] = ()


def wilson(attained: int, about: int, z: float = CONFIDENCE_Z) -> tuple[float, float]:
    """The interval of a share (E. B. Wilson, 1927). (0, 1) of nothing."""
    if not about:
        return 0.0, 1.0
    share, scale = attained / about, z * z / about
    middle = (share + scale / 2) / (1 + scale)
    half = z / (1 + scale) * math.sqrt(share * (1 - share) / about + scale / (4 * about))
    return max(0.0, middle - half), min(1.0, middle + half)


Probe = Callable[[float], tuple[int, int, bool] | None]
"""Of a rate: how many requests attained the objective, of how many, and whether the run was steady; None ends all."""


def find_goodput(
    probe: Probe,
    target: float,
    start_rps: float,
    *,
    tolerance: float = 0.1,
    lowest_rps: float | None = None,
    highest_rps: float | None = None,
    repeats: int = 3,
) -> Goodput:
    """Doubles or halves from `start_rps` until one rate meets the target and one does not, then halves between them.

    Args:
        target: share of requests that is to attain the objective.
        tolerance: the search ends when the missed rate is at most so much above the met one, as a share of it.
        lowest_rps, highest_rps: rates beyond which nothing is tried; by default 64 times below and above the start.
        repeats: probes of one rate, at most.
    """
    lowest, highest = lowest_rps or start_rps / 64, highest_rps or start_rps * 64
    probed: dict[float, Probed] = {}
    rate = min(max(start_rps, lowest), highest)
    while rate not in probed:
        one = probed[rate] = Probed(rate)
        while one.runs < repeats and not one.decided(target):
            if (found := probe(rate)) is None:
                return _result([one for one in probed.values() if one.runs], target)
            one.add(*found)
        result = _result(probed.values(), target)
        met, missed = result.rate_rps, result.missed_rps
        if missed is None:
            rate = min(met * 2, highest)
        elif not met:
            rate = max(missed / 2, lowest)
        elif missed > met * (1 + tolerance):
            rate = (met + missed) / 2
    return result


def _result(probed: Iterable[Probed], target: float) -> Goodput:
    """The highest rate that meets the target below the lowest that misses, and that one."""
    by_rate = sorted(probed, key=lambda one: one.rate_rps)
    missed = next((one for one in by_rate if not one.meets(target)), None)
    met = next((one for one in reversed(by_rate) if missed is None or one.rate_rps < missed.rate_rps), None)
    sure = bool(by_rate) and all(one.decided(target) for one in (met, missed) if one is not None)
    return Goodput(met.rate_rps if met else 0.0, missed.rate_rps if missed else None, sure, tuple(by_rate))
