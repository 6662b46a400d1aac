"""Where the time of a request goes: what proxy and stages stamped, and what its client saw around that. Pure.

Phases (`epd_serve/phases/phase.py`) may run beside each other: D prepares while P does, KV travels under the prefill.
So each has two times: its *duration*, and of that the *exposed* part, in which the request waited for nothing else. A
moment of several phases belongs to the one that works before the one that carries, and to that before the one that
waits; of equals to the one that ends last, but to D's preparing only while P's has ended: P begins without D. Exposed
parts therefore add up to the request, but for moments that no phase accounts for.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from bench.clients.results import RequestRecord
from bench.statistic import percentile
from epd_serve.phases.join import between, spans_of_stamps
from epd_serve.phases.phase import Phase, Span
from epd_serve.phases.stamps import Stamp, Timeline
from epd_serve.trace import PROXY

HOPS = frozenset({
    *(Phase.HTTP_CLIENT, Phase.PROXY, Phase.PROXY_QUEUE, Phase.FAILED),
    *(Phase.HTTP_E, Phase.ANSWER_E, Phase.HTTP_P, Phase.PREPROCESS_P, Phase.EP, Phase.PD),
    *(Phase.HTTP_D, Phase.PREPROCESS_D, Phase.DECODE_QUEUE, Phase.FIRST_TOKEN, Phase.ANSWER_D),
})  # fmt: skip
"""What a monolith has nothing like: proxy, metadata, feature, KV, D's start. P's preparing, as E has done it before."""
_WAITS = {Phase.PROXY_QUEUE, Phase.ENCODE_QUEUE, Phase.PREFILL_QUEUE, Phase.DECODE_QUEUE}
_CARRIES = {Phase.EP, Phase.PD}
_COMPUTES = {Phase.ENCODE, Phase.PREFILL, Phase.FIRST_TOKEN, Phase.DECODE}
_BESIDE = {Phase.HTTP_D, Phase.PREPROCESS_D}
_PREPARES = 3
_RANK = (
    dict.fromkeys(_WAITS, 0)
    | dict.fromkeys(_CARRIES, 1)
    | dict.fromkeys(_BESIDE, _PREPARES - 1)
    | dict.fromkeys(_COMPUTES, _PREPARES + 1)
)
"""Whose a moment of several phases is; what is not in it prepares."""


def joined(record: RequestRecord, timeline: Timeline) -> dict[str, Any] | None:
    """The line of a request in `phases.jsonl`; None where it has no first token, or the stamps do not know it.

    The sender's request id is in the proxy's stamp `arrived`; both read CLOCK_MONOTONIC, so it holds on one host only.
    """
    stamps = timeline.named(record.id)
    if not stamps or record.first_s is None or record.last_s is None or record.sent_s is None:
        return None
    names = {"id": record.id, "run": record.run, "path": record.path}
    return line(names, spans_of(stamps, record), due_s=record.due_s, first_s=record.first_s, last_s=record.last_s)


def spans_of(stamps: Sequence[Stamp], record: RequestRecord) -> list[Span]:
    """A request's phases, from the stamps of its life (`Timeline.named`) and what its client noted."""
    first, last = record.first_s, record.last_s
    assert record.sent_s is not None and first is not None and last is not None, "an answer with tokens"
    proxy = {stamp.event: stamp.t for stamp in stamps if stamp.instance == PROXY}  # the last one of each
    if "arrived" in proxy:
        there, back = proxy.get("received"), proxy.get("first_byte")
    else:  # a stage was asked past the proxy
        there = next((stamp.t for stamp in stamps if stamp.event == "received"), None)
        back = next((stamp.t for stamp in stamps if stamp.event == "answering"), None)
    found = [
        *between(Phase.CLIENT, record.due_s, record.sent_s),
        *between(Phase.DECODE, first, last),
        *spans_of_stamps(stamps),
        *between(Phase.HTTP_CLIENT, record.sent_s, there),
        *between(Phase.HTTP_CLIENT, back, first),
    ]
    return [
        Span(max(span.begin, record.due_s), min(span.end, last), span.phase, span.instance)
        for span in found
        if min(span.end, last) > max(span.begin, record.due_s)
    ]


def durations(spans: Iterable[Span]) -> dict[Phase, float]:
    """Seconds of each phase; what two spans of one phase share counts once."""
    taken: dict[Phase, float] = {}
    until: dict[Phase, float] = {}
    for span in sorted(spans):
        begin = max(span.begin, until.get(span.phase, span.begin))
        taken[span.phase] = taken.get(span.phase, 0.0) + max(0.0, span.end - begin)
        until[span.phase] = max(span.end, begin)
    return {phase: taken[phase] for phase in Phase if phase in taken}


def exposed(spans: Iterable[Span]) -> dict[Phase, float]:
    """Seconds in which a request waited for this phase and no other: every moment belongs to one phase."""
    spans = list(spans)
    taken: dict[Phase, float] = defaultdict(float)
    edges = sorted({edge for span in spans for edge in (span.begin, span.end)})
    for begin, end in itertools.pairwise(edges):
        here = [span for span in spans if span.begin <= begin and span.end >= end]
        if here:
            waited_for = max(here, key=lambda span: (_RANK.get(span.phase, _PREPARES), span.end))
            taken[waited_for.phase] += end - begin
    return {phase: taken[phase] for phase in Phase if phase in taken}


def line(
    names: Mapping[str, str], spans: Iterable[Span], *, due_s: float, first_s: float, last_s: float
) -> dict[str, Any]:
    """A line of `phases.jsonl`: milliseconds of one request by phase, from when it was due to its last token.

    `unaccounted_ms` is what no phase accounts for, `sum_error` its share of the time to first token, which is stricter
    than of the whole.

    Args:
        names: `id` and `run` of the request, and what else is to be said of it.
    """
    spans = list(spans)
    alone = exposed(spans)
    unaccounted_s, ttft_s = last_s - due_s - sum(alone.values()), first_s - due_s
    return {
        **names,
        "ttft_ms": _ms(ttft_s),
        "e2e_ms": _ms(last_s - due_s),
        "phases_ms": {phase.value: _ms(seconds) for phase, seconds in durations(spans).items()},
        "exposed_ms": {phase.value: _ms(seconds) for phase, seconds in alone.items()},
        "unaccounted_ms": _ms(unaccounted_s),
        "sum_error": round(unaccounted_s / ttft_s, 5) if ttft_s else 0.0,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class RequestPhases(msgspec.Struct, frozen=True):
    """Of one request, milliseconds by phase: a line of `phases.jsonl`."""

    run: str
    ttft_ms: float
    e2e_ms: float
    taken: dict[Phase, float] = msgspec.field(name="phases_ms")
    exposed: dict[Phase, float] = msgspec.field(name="exposed_ms")


def request_phases(plain: Mapping[str, Any]) -> RequestPhases:
    """Of a line. Raises msgspec.ValidationError where it is none of this version's."""
    return msgspec.convert(plain, RequestPhases)


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of the requests of one run, by phase; a request that does not pass a phase spends nothing in it.

    Attributes:
        requests: whose phases are known. encoded: how many of them passed an encoder of its own.
        mean, p95: durations. exposed: mean; what of it is not `DECODE` adds up to about `ttft_ms`.
    """

    requests: int
    encoded: int
    ttft_ms: float
    e2e_ms: float
    mean: Mapping[Phase, float]
    p95: Mapping[Phase, float]
    exposed: Mapping[Phase, float]


def breakdown(requests: Iterable[RequestPhases]) -> Breakdown | None:
    """Of the requests of one run; None of none."""
    known = list(requests)
    if not known:
        return None
    taken = _by_phase(one.taken for one in known)
    return Breakdown(
        len(known),
        sum(Phase.ENCODE in one.taken for one in known),
        float(np.mean([one.ttft_ms for one in known])),
        float(np.mean([one.e2e_ms for one in known])),
        {phase: float(np.mean(values)) for phase, values in taken.items()},
        {phase: percentile(values, 95) for phase, values in taken.items()},
        {phase: float(np.mean(values)) for phase, values in _by_phase(one.exposed for one in known).items()},
    )


def _by_phase(requests: Iterable[Mapping[Phase, float]]) -> dict[Phase, list[float]]:
    requests = list(requests)
    values = {phase: [one.get(phase, 0.0) for one in requests] for phase in Phase}
    return {phase: own for phase, own in values.items() if any(own)}


def phase_figures(found: Breakdown) -> dict[str, Any]:
    """As a run's figures have it."""
    parts = {"phases_ms": found.mean, "phases_p95_ms": found.p95, "exposed_ms": found.exposed}
    rounded = {name: {phase.value: round(ms, 3) for phase, ms in part.items()} for name, part in parts.items()}
    return {"joined": found.requests, "ttft_ms": round(found.ttft_ms, 3), **rounded}


GOALS_MS = {Phase.EP: 2.0, Phase.PD: 8.0}
"""P95 of a migration in HydraInfer (v2 §5.4); its share of the whole latency is below `GOAL_SHARE`."""
GOAL_SHARE = 0.01


def phase_rows(found: Breakdown) -> list[dict[str, Any]]:
    """A row per phase, in order: mean, P95 and exposed milliseconds, share of the whole request, and of migrations
    whether they are as short as HydraInfer's."""
    rows = []
    for phase, mean_ms in found.mean.items():
        share, p95_ms, most_ms = mean_ms / found.e2e_ms, found.p95[phase], GOALS_MS.get(phase)
        goal = ""
        if most_ms is not None:
            met = share < GOAL_SHARE and p95_ms <= most_ms
            goal = f"P95 <= {most_ms:g} ms, < {GOAL_SHARE:.0%}: {'met' if met else 'MISSED'}"
        alone_ms = found.exposed.get(phase, 0.0)
        times = {"mean ms": mean_ms, "P95 ms": p95_ms, "exposed ms": alone_ms, "share of the request": share}
        rows.append({"phase": phase.value, **times, "goal": goal})
    return rows
