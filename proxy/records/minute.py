"""What has come and what has ended within the last minute or less: counts, and how long first tokens and tokens took.
Pure.

Times are counted in buckets whose ends are a factor of 2**(1/4) apart, so that those of several front doors add up, and
a percentile is right within a tenth. The minute is cut into parts of a second, and a window is made of whole parts.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from epd_serve.slo import Slo as Objective
from proxy.config.limits import Planned, Slo
from proxy.records.kept import SERIOUS
from proxy.records.record import Record

PART_S, MINUTE_S = 1.0, 60.0
PER_OCTAVE = 4
LEAST_S = 1e-4
FRACTIONS = {"p50": 0.5, "p99": 0.99}
SLO, UNPLANNED = Slo(), Planned()
ENOUGH = 20
"""Judged answers of a minute from which on a plan is said to hold or not."""
BEYOND, SLOWER, POINTS = 1.25, 1.5, 0.1
"""More requests than planned by so much is another load; a median longer by so much, or an attainment lower by so many
points, is not what was planned. Simulators of serving are off by a fifth on first tokens (docs/guides/planning.md)."""


class KindCounts(Struct):
    """Requests of one kind: those that have come in some time, and those that have ended in it.

    Attributes:
        requests: that have come, before anything of their kind is refused.
        known_prompts: of requests whose media have been loaded, which those that were refused before have not.
            items: of those. item_tokens: of them. prompt_tokens: of their prompts, items included. Tokens are
            estimated, as loads are (`proxy/stages/prompt.py`).
        ended: requests, refused ones included. known_outputs: of those whose output is known. output_tokens: of it.
    """

    requests: int = 0
    known_prompts: int = 0
    items: int = 0
    item_tokens: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    known_outputs: int = 0
    output_tokens: int = 0


class Counts(Struct):
    """What has come and what has ended in some time, at some workers.

    Attributes:
        seconds: how long that was; of several workers, the longest.
        serving: workers that serve. answered: those of them that have told their counts, which these are.
        kinds: by `text` and `media`, requests that ask stages for something. Those that are refused before their body
            is read, or that make no sense, have no kind.
        outcomes, codes: requests by outcome, and by the code of the error that they ended in.
        refused: by code, those that were turned away with 429 or 503.
        first_byte, token: of streams, by bucket. tokens: of answers, as far as they are known.
        running: requests that have not ended. waiting: those of them that no stage has been asked for yet.
        judged: streamed answers, and whatever else failed of this server. attained: those of them within `slo`.
        by_mean: those within its limits by their mean time per token, whatever its judge.
    """

    seconds: float = 0.0
    outcomes: dict[str, int] = {}
    codes: dict[str, int] = {}
    refused: dict[str, int] = {}
    retried: int = 0
    tokens: int = 0
    first_byte: dict[int, int] = {}
    token: dict[int, int] = {}
    running: int = 0
    waiting: int = 0
    judged: int = 0
    attained: int = 0
    by_mean: int = 0
    slo: Slo = SLO
    planned: Planned = UNPLANNED
    kinds: dict[str, KindCounts] = {}
    answered: int = 0
    serving: int = 0

    def kind(self, name: str) -> KindCounts:
        """Of this kind, to be added to."""
        return self.kinds.setdefault(name, KindCounts())

    def add(self, record: Record) -> None:
        """It has ended."""
        _count(self.outcomes, record.outcome)
        if record.code:
            _count(self.codes, record.code)
            if record.status in (429, 503):
                _count(self.refused, record.code)
        self.retried += record.retried
        tokens = record.tokens_sent
        self.tokens += tokens or 0
        if record.kind:
            kind = self.kind(record.kind)
            kind.ended += 1
            kind.known_outputs += tokens is not None
            kind.output_tokens += tokens or 0
        if record.first_byte_s is not None:
            _count(self.first_byte, bucket(record.first_byte_s))
        if (token_s := record.token_s(tokens)) is not None:
            _count(self.token, bucket(token_s))
        if is_judged(record):
            self.judged += 1
            usual, mean = _objectives(self.slo)
            self.attained += attains(record, token_s, usual)
            self.by_mean += attains(record, token_s, mean)

    def summary(self) -> dict[str, Any]:
        """For people: rates per second, percentiles in ms, None where nothing was counted; of how many workers, where
        some have not answered."""
        seconds, requests = max(self.seconds, 1.0), sum(self.outcomes.values())
        complete = self.answered >= self.serving
        return {
            **({} if complete else {"answered": self.answered, "serving": self.serving}),
            "seconds": round(self.seconds, 1),
            "running": self.running,
            "waiting": self.waiting,
            "requests": requests,
            "requests_per_s": round(requests / seconds, 2),
            "tokens_per_s": round(self.tokens / seconds, 1),
            "ttft_ms": _percentiles(self.first_byte),
            "tpot_ms": _percentiles(self.token),
            "outcomes": self.outcomes,
            "codes": self.codes,
            "refused": self.refused,
            "retried": self.retried,
            "slo": {
                "ttft_s": self.slo.limits_s[0],
                "tpot_s": self.slo.limits_s[1],
                "judged": self.judged,
                "judge": self.slo.judge,
                **self._share(self.attained, seconds),
                "mean": self._share(self.by_mean, seconds),
            },
            "planned": self._planned(requests / seconds),
        }

    def _planned(self, requests_per_s: float) -> dict[str, Any] | None:
        """What was planned, and under `apart` in what the minute is not that; None without a plan."""
        plan = self.planned
        if not plan.rate_rps:
            return None
        apart = []
        if self.judged >= ENOUGH:
            attainment = self.attained / self.judged
            if requests_per_s > BEYOND * plan.rate_rps:
                apart.append(f"{requests_per_s:.3g} requests/s come, {plan.rate_rps:.3g} were planned for")
            for name, planned_s, measured in (
                ("TTFT", plan.ttft_s, self.first_byte),
                ("TPOT", plan.tpot_s, self.token),
            ):
                median_s = percentile_s(measured, 0.5)
                if planned_s and median_s is not None and median_s > SLOWER * planned_s:
                    apart.append(f"{name} p50 is {1e3 * median_s:.4g} ms, {1e3 * planned_s:.4g} were planned")
            if attainment < plan.attainment - POINTS:
                apart.append(f"{attainment:.0%} are within the SLO, {plan.attainment:.0%} were planned")
        return {
            "rate_rps": plan.rate_rps,
            "ttft_ms": round(1e3 * plan.ttft_s, 2),
            "tpot_ms": round(1e3 * plan.tpot_s, 2),
            "attainment": plan.attainment,
            "apart": apart,
        }

    def _share(self, attained: int, seconds: float) -> dict[str, Any]:
        return {
            "attained": attained,
            "attainment": round(attained / self.judged, 4) if self.judged else None,
            "goodput_per_s": round(attained / seconds, 2),
        }


def together(several: Iterable[Counts]) -> Counts:
    """What several processes have counted, in the longest of their times."""
    every = list(several)
    settings = next((one for one in every if one.answered), Counts())

    def summed(name: str) -> dict[Any, int]:
        total: Counter[Any] = Counter()
        for one in every:
            total.update(getattr(one, name))
        return dict(total)

    return Counts(
        max((one.seconds for one in every), default=0.0),
        summed("outcomes"),
        summed("codes"),
        summed("refused"),
        sum(one.retried for one in every),
        sum(one.tokens for one in every),
        summed("first_byte"),
        summed("token"),
        sum(one.running for one in every),
        sum(one.waiting for one in every),
        sum(one.judged for one in every),
        sum(one.attained for one in every),
        sum(one.by_mean for one in every),
        settings.slo,
        settings.planned,
        _kinds(every),
        sum(one.answered for one in every),
        sum(one.serving for one in every),
    )


def _kinds(several: Sequence[Counts]) -> dict[str, KindCounts]:
    together: dict[str, list[KindCounts]] = {}
    for one in several:
        for name, counts in one.kinds.items():
            together.setdefault(name, []).append(counts)
    return {name: KindCounts(*map(sum, zip(*map(astuple, counts), strict=True))) for name, counts in together.items()}


class LastMinute:
    """Of one process. Times are of its clock, and do not go backwards. Parts begin at whole multiples of `PART_S`, so
    those of the processes of one host begin together."""

    def __init__(self, now: float, slo: Slo = SLO, planned: Planned = UNPLANNED) -> None:
        self._began = now
        self._slo, self._planned = slo, planned
        self._parts: deque[tuple[float, Counts]] = deque(maxlen=round(MINUTE_S / PART_S) + 1)

    def arrived(self, kind: str, now: float) -> None:
        """A request of this kind has come."""
        self._part(now).kind(kind).requests += 1

    def prompt_known(self, kind: str, items: int, item_tokens: float, prompt_tokens: float, now: float) -> None:
        """One that came before has so many items, tokens of them, and of its prompt with them."""
        counts = self._part(now).kind(kind)
        counts.known_prompts += 1
        counts.items += items
        counts.item_tokens += round(item_tokens)
        counts.prompt_tokens += round(prompt_tokens)

    def add(self, record: Record) -> None:
        """It has ended."""
        self._part(record.clock + record.total_s).add(record)

    def counts(self, now: float, window_s: float = MINUTE_S) -> Counts:
        """Of the last `window_s` seconds, a minute at most, and of less than `PART_S` before them, since parts are
        whole. How long that is together, or how long this process has counted if it is younger, is in `seconds`."""
        since = _part_of(now - min(window_s, MINUTE_S))
        counts = together(part for began, part in self._parts if began >= since)
        counts.seconds = now - max(since, self._began)
        counts.slo, counts.planned = self._slo, self._planned
        counts.answered = counts.serving = 1
        return counts

    def _part(self, now: float) -> Counts:
        began = _part_of(now)
        if not self._parts or self._parts[-1][0] < began:
            self._parts.append((began, Counts(slo=self._slo)))
        return self._parts[-1][1]


def _part_of(now: float) -> float:
    """When it began."""
    return math.floor(now / PART_S) * PART_S


def is_judged(record: Record) -> bool:
    """Whether an objective is about it: not where its client has left or was wrong, or an answer was not streamed."""
    if record.outcome == "200":
        return record.first_byte_s is not None
    return record.outcome == "broken" or record.status >= 500 or record.status in SERIOUS


def attains(record: Record, token_s: float | None, slo: Objective) -> bool:
    """Whether it was answered whole within both limits. Of several answers at once the first token alone counts."""
    if record.outcome != "200" or record.first_byte_s is None:
        return False
    gaps = (record.gaps, record.gaps_within) if record.answers == 1 else (0, 0)
    return slo.attained(record.first_byte_s, token_s, *gaps)


@cache
def _objectives(slo: Slo) -> tuple[Objective, Objective]:
    return slo.objectives()


def bucket(seconds: float) -> int:
    """Bucket `b` holds times up to `LEAST_S * 2 ** (b / PER_OCTAVE)`."""
    return max(0, math.ceil(PER_OCTAVE * math.log2(max(seconds, LEAST_S) / LEAST_S)))


def percentile_s(buckets: Mapping[int, int], fraction: float) -> float | None:
    """The time that this fraction did not exceed, as if times were spread evenly within a bucket."""
    left = fraction * sum(buckets.values())
    if not left:
        return None
    for at in sorted(buckets):
        if buckets[at] >= left:
            return LEAST_S * math.exp2((at - 1 + left / buckets[at]) / PER_OCTAVE)
        left -= buckets[at]
    return LEAST_S * math.exp2(max(buckets) / PER_OCTAVE)


def _percentiles(buckets: Mapping[int, int]) -> dict[str, float | None]:
    seconds = {name: percentile_s(buckets, fraction) for name, fraction in FRACTIONS.items()}
    return {name: round(1000 * s, 2) if s is not None else None for name, s in seconds.items()}


def _count(counts: dict[Any, int], name: Any) -> None:
    counts[name] = counts.get(name, 0) + 1
