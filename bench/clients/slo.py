"""Which requests attain an objective (`epd_serve/slo.py`). Pure.

A request attains an objective when it was answered whole within both bounds. Whatever else became of it, but that its
own client left, is a miss: an objective that only counts survivors flatters who drops the slow ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bench.clients.results import Outcome, RequestRecord
from epd_serve.slo import MEAN, Slo, gaps_within

GOOD_SHARE = 0.9
"""Of requests within the objective at which a rate counts as goodput (HydraInfer §5.2, DistServe)."""


PAPER = (Slo(2000, 50), Slo(2000, 80), Slo(800, 30))
"""EPD-Serve §4: TTFT within 2 s with 50 or 80 ms per token, and the strict one."""


def beside(slos: Iterable[Slo]) -> tuple[Slo, ...]:
    """Each, and beside it the same limits judged by the mean."""
    return tuple(dict.fromkeys(one for slo in slos for one in (slo, replace(slo, judge=MEAN))))


def counted(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Those that an objective is about: all but requests whose client left."""
    return [record for record in records if record.outcome is not Outcome.CANCELLED]


def attains(record: RequestRecord, slo: Slo) -> bool:
    """Whether it was answered whole within `slo`."""
    if not record.ok or record.ttft_s is None:
        return False
    return slo.attained(record.ttft_s, record.tpot_s, *gaps_within(record.token_s, slo.tpot_ms / 1e3))


def attainment(records: Sequence[RequestRecord], slo: Slo) -> float | None:
    """The share of requests that attain it; None of none."""
    about = counted(records)
    return sum(attains(record, slo) for record in about) / len(about) if about else None
