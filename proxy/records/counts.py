"""What requests add up to: counted once, for ever for Prometheus, and for the last minute as what that has gained.

Within a second of the clock things are counted together, so a window is made of whole seconds, which begin together in
all processes of one host. Times are counted in buckets: the bounds that Prometheus is told, and between them some a
factor of 2**(1/4) apart, so that the times of several front doors add up and a percentile is right within a tenth.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple, replace
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from epd_serve.slo import MEAN
from epd_serve.slo import Slo as Objective
from proxy.config.limits import Planned, Slo
from proxy.metrics import SECONDS, LabelledCounter, LabelledHistogram
from proxy.records.record import Record

MINUTE_S = 60.0
FRACTIONS = {"p50": 0.5, "p99": 0.99}
SLO, UNPLANNED = Slo(), Planned()
ENOUGH = 20
"""Judged answers of a minute from which on a plan is said to hold or not."""
BEYOND, SLOWER, POINTS = 1.25, 1.5, 0.1
"""More requests than planned by so much is another load; a median longer by so much, or an attainment lower by so many
points, is not what was planned. Simulators of serving are off by a fifth on first tokens (docs/guides/planning.md)."""

SERIOUS = (408, 422, 429)
"""Statuses below 500 that say more of this server than of the request."""

NO_PATH = "none"
"""Of a request that no stage was asked for an answer to."""

MAX_CODES = 64
"""Codes that are told apart: some are stages' words."""

OTHER = "other"
BY = ("path", "modality")
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1)
LEAST_S = 1e-4
BOUNDS = sorted({*SECONDS, *TOKEN_SECONDS, *(LEAST_S * 2 ** (step / 4) for step in range(98))})
"""Ends of the buckets of first tokens and of tokens; the longest is half an hour."""


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
        lines: those who wait in front of the stages now, by line (`AdmissionQueue.look`).
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
    lines: dict[str, dict[str, float]] = {}

    def summary(self) -> dict[str, Any]:
        """For people: rates per second, percentiles in ms, None where nothing was counted; of how many workers, where
        some have not answered."""
        seconds, requests = max(self.seconds, 1.0), sum(self.outcomes.values())
        complete = self.answered >= self.serving

        def share(attained: int) -> dict[str, Any]:
            attainment = round(attained / self.judged, 4) if self.judged else None
            return {"attained": attained, "attainment": attainment, "goodput_per_s": round(attained / seconds, 2)}

        return {
            **({} if complete else {"answered": self.answered, "serving": self.serving}),
            "seconds": round(self.seconds, 1),
            "running": self.running,
            "waiting": self.waiting,
            "lines": self.lines,
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
                **share(self.attained),
                "mean": share(self.by_mean),
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


def together(several: Iterable[Counts]) -> Counts:
    """What several processes have counted, in the longest of their times."""
    every = list(several)
    settings = next((one for one in every if one.answered), Counts())
    seconds = max((one.seconds for one in every), default=0.0)
    return replace(reduce(_added, every, Counts()), seconds=seconds, slo=settings.slo, planned=settings.planned)


def _added(one: Any, other: Any) -> Any:
    """The sum, by key or by field; of what cannot be added, the first."""
    if isinstance(one, Struct):
        return type(one)(*map(_added, astuple(one), astuple(other)))
    if isinstance(one, dict):
        both = {key: _added(one[key], other[key]) for key in one.keys() & other.keys()}
        return {**one, **other, **both}
    return one + other if isinstance(one, int | float) else one


class RequestCounts(Collector):
    """Of one process, whose registry collects it. Times are of its clock.

    Labels: `status` is the HTTP status, `cancelled`, or `broken` (failed mid-stream); `path` that of the last attempt,
    or `none`; `modality` is `text`, or what the request has items of, such as `image+video`.

    Args:
        slo: what streamed answers are to keep to. planned: what was expected of them.
    """

    def __init__(self, now: float, slo: Slo = SLO, planned: Planned = UNPLANNED) -> None:
        self._began = now
        self._slo, self._planned = slo, planned
        self._objectives = tuple(dict.fromkeys(slo.objectives()))  # one, where the mean judges
        self._past: deque[tuple[float, list[Mapping[Any, float]]]] = deque(maxlen=round(MINUTE_S) + 1)
        self._requests = LabelledCounter("epd_proxy_requests", "Requests ended.", ("endpoint", "status"))
        self._errors = LabelledCounter(
            "epd_proxy_errors",
            "Requests that ended in an error, by its code: refusals (429, 503), failures, and mistakes of clients.",
            ("status", "code"),
        )
        self._failures = LabelledCounter(
            "epd_proxy_stage_failures",
            "Calls to an instance that failed, by the error's code, also where another attempt helped.",
            ("instance", "code"),
        )
        self._retried = LabelledCounter("epd_proxy_requests_retried", "Requests of which something was done again.", ())
        self._tokens = LabelledCounter(
            "epd_proxy_tokens",
            "Tokens of prompts, those of them that a prefix cache had, and tokens of answers, as far as stages say.",
            ("kind", *BY),
        )
        self._kinds = LabelledCounter(
            "epd_proxy_asked",
            "Requests that ask stages for something, with and without media, and what they ask for: `requests` that "
            "came, `items`, `item_tokens` and `prompt_tokens` of the `known_prompts` (estimated), requests that "
            "`ended`, and `output_tokens` of the `known_outputs`.",
            ("kind", "of"),
        )
        self._attained = LabelledCounter(
            "epd_proxy_slo_requests",
            "Streamed answers, and whatever else failed of this server: whether they were within slo.ttft_s and "
            "slo.tpot_s, by the judge of their token gaps that is set (slo.judge), and by the mean.",
            ("judge", "attained"),
        )
        self._phases = LabelledHistogram(
            "epd_proxy_phase_seconds",
            "How long a phase took in all of a request's life: `body` arriving, `media`, `queue`, `encode`, `prefill`. "
            "Phases overlap.",
            ("phase", *BY),
        )
        self._ttft = LabelledHistogram(
            "epd_proxy_ttft_seconds",
            "From the request's arrival to the first token of its stream, whichever instance that is from.",
            BY,
            bounds=BOUNDS,
        )
        self._tpot = LabelledHistogram(
            "epd_proxy_tpot_seconds",
            "Time per token after the first, the mean of each stream, of streams of one answer.",
            BY,
            buckets=TOKEN_SECONDS,
            bounds=BOUNDS,
        )
        self._total = LabelledHistogram(
            "epd_proxy_request_seconds", "From the arrival to the end of the answer, of requests with status 200.", BY
        )
        self._prefix = LabelledCounter(
            "epd_proxy_prefix_effect_tokens",
            "Tokens of prompts of which the stage said how many it found in its prefix cache: those that it found "
            "(`cached`), those that it was to have (`predicted`), and all of them where that is known (`prompt`).",
            ("which",),
        )
        self._codes: set[str] = set()
        self._windowed = (
            self._requests, self._errors, self._retried, self._tokens, self._kinds, self._attained, self._ttft,
            self._tpot,
        )  # fmt: skip

    def asked(self, kind: str, now: float, **counts: float) -> None:
        """So many more of what `KindCounts` has, of this kind."""
        self._at(now)
        kinds = self._kinds.counts
        for of, count in counts.items():
            kinds[kind, of] += round(count)

    def ended(self, record: Record) -> None:
        """Count it."""
        now = record.clock + record.total_s
        self._at(now)
        by, tokens = (record.path or NO_PATH, record.modality), record.tokens_sent
        token_s = record.token_s(tokens)
        self._requests.counts[record.endpoint, record.outcome] += 1
        if record.code:
            self._errors.counts[record.outcome, self._known(record.code)] += 1
        for stage, code in record.failures:
            self._failures.counts[stage, self._known(code)] += 1
        self._count_prefix(record)
        if record.retried:
            self._retried.counts[()] += 1
        if record.kind:
            self.asked(record.kind, now, ended=1, known_outputs=tokens is not None, output_tokens=tokens or 0)
        for kind, count in (("prompt", record.prompt_tokens), ("cached", record.cached_tokens), ("answer", tokens)):
            if count:
                self._tokens.counts[kind, *by] += count
        for slo in self._objectives:
            if (within := attained(record, token_s, slo)) is not None:
                self._attained.counts[slo.judge, "yes" if within else "no"] += 1
        for phase, phase_s in record.phases_s.items():
            self._phases.observe((phase, *by), phase_s)
        if record.first_byte_s is not None:
            self._ttft.observe(by, record.first_byte_s)
        if token_s is not None:
            self._tpot.observe(by, token_s)
        if record.outcome == "200":
            self._total.observe(by, record.total_s)

    def _count_prefix(self, record: Record) -> None:
        """What the index of prefixes predicted beside what the stage that took the prompt says that it found."""
        if record.cached_tokens is None:
            return
        heads = [one for one in record.choices if one.work == "prompt"]
        if not heads:
            return
        taken = record.prefill or record.decode
        predicted = sum(one.cached for one in heads[-1].candidates if one.id == taken)
        tokens = {"predicted": predicted, "cached": record.cached_tokens, "prompt": record.prompt_tokens or 0}
        for which, count in tokens.items():
            self._prefix.counts[which,] += count

    def counts(self, now: float, window_s: float = MINUTE_S) -> Counts:
        """Of the last `window_s` seconds, a minute at most, and of less than one before them, since seconds are whole.
        How long that is together, or how long this process has counted if it is younger, is in `seconds`."""
        since = math.floor(now - min(window_s, MINUTE_S))
        before = next((counts for second, counts in self._past if second >= since), None)
        # Where nothing has come since then, nothing was gained.
        requests, errors, retried, tokens, kinds, judged, ttft, tpot = (
            _gained(family.counts, then) for family, then in zip(self._windowed, before or self._totals(), strict=True)
        )
        return Counts(
            now - max(since, self._began),
            outcomes=_by(requests, 1),
            codes=_by(errors, 1),
            refused=_by({labels: count for labels, count in errors.items() if labels[0] in ("429", "503")}, 1),
            retried=sum(retried.values()),
            tokens=_by(tokens, 0).get("answer", 0),
            first_byte=_by(ttft, -1),
            token=_by(tpot, -1),
            judged=_by(judged, 0).get(self._slo.judge, 0),
            attained=judged.get((self._slo.judge, "yes"), 0),
            by_mean=judged.get((MEAN, "yes"), 0),
            slo=self._slo,
            planned=self._planned,
            kinds={
                kind: KindCounts(**{of: count for (one, of), count in kinds.items() if one == kind})
                for kind in _by(kinds, 0)
            },
            answered=1,
            serving=1,
        )

    def collect(self) -> Iterator[Metric]:
        for family in (*self._windowed, self._failures, self._prefix, self._phases, self._total):
            yield from family.collect()

    def _totals(self) -> list[Mapping[Any, float]]:
        return [dict(family.counts) for family in self._windowed]

    def _at(self, now: float) -> None:
        """Before something is counted: with the first of a second, what there was until then is remembered."""
        second = math.floor(now)
        if not self._past or self._past[-1][0] < second:
            self._past.append((second, self._totals()))

    def _known(self, code: str) -> str:
        if code not in self._codes:
            if len(self._codes) >= MAX_CODES:
                return OTHER
            self._codes.add(code)
        return code


def _gained(now: Mapping[Any, float], then: Mapping[Any, float]) -> dict[Any, int]:
    return {labels: int(count - then.get(labels, 0)) for labels, count in now.items() if count != then.get(labels, 0)}


def _by(counts: Mapping[Any, int], label: int) -> dict[Any, int]:
    """The sums by one of the labels."""
    sums: Counter[Any] = Counter()
    for labels, count in counts.items():
        sums[labels[label]] += count
    return dict(sums)


def failed_here(record: Record) -> bool:
    """Whether it ended in an error of ours, a refusal, or an answer cut off."""
    return record.outcome == "broken" or record.status >= 500 or record.status in SERIOUS


def attained(record: Record, token_s: float | None, slo: Objective) -> bool | None:
    """Whether it was answered whole within both limits; of several answers at once the first token alone counts. None
    where no objective is about it: its client has left or was wrong, or an answer was not streamed."""
    if record.outcome != "200":
        return False if failed_here(record) else None
    if record.first_byte_s is None:
        return None
    gaps = (record.gaps, record.gaps_within) if record.answers == 1 else (0, 0)
    if record.ttft_limit_s:
        slo = Objective(1e3 * record.ttft_limit_s, 1e3 * record.gap_limit_s, slo.judge)
    return slo.attained(record.first_byte_s, token_s, *gaps)


def percentile_s(buckets: Mapping[int, int], fraction: float) -> float | None:
    """The time that this fraction did not exceed, as if times were spread evenly within a bucket of `BOUNDS`."""
    left = fraction * sum(buckets.values())
    for at, count in sorted(buckets.items()):
        if count >= left > 0:
            low, high = (BOUNDS[min(max(end, 0), len(BOUNDS) - 1)] for end in (at - 1, at))
            return low + (high - low) * left / count
        left -= count
    return None


def _percentiles(buckets: Mapping[int, int]) -> dict[str, float | None]:
    seconds = {name: percentile_s(buckets, fraction) for name, fraction in FRACTIONS.items()}
    return {name: round(1000 * s, 2) if s is not None else None for name, s in seconds.items()}
