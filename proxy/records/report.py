"""A record as JSON, for `epd-serve why` and other programs: what choices went by, how its time was spent. Pure."""

from __future__ import annotations

import math
from typing import Any

from proxy.records.record import Choice, Record

PLACES = 6


def summary(record: Record) -> dict[str, Any]:
    """One line of a list."""
    return {
        "id": record.id,
        "client_id": record.client_id,
        "began": record.began,
        "endpoint": record.endpoint,
        "items": record.media,
        "path": record.path,
        "outcome": record.outcome or "running",
        "status": record.status or None,
        "code": record.code,
        "attempts": record.attempts,
        "retried": record.retried,
        "migrations": record.migrations,
        "first_byte_s": _rounded(record.first_byte_s),
        "total_s": _rounded(record.total_s),
    }


def report(record: Record) -> dict[str, Any]:
    """All of it."""
    return {
        **summary(record),
        "clock": record.clock,
        "trace_id": record.trace.trace_id if record.trace is not None else "",
        "tenant": record.tenant,
        "model": record.model,
        "stream": record.stream,
        "answers": record.answers,
        "encode": record.encode,
        "prefill": record.prefill,
        "decode": record.decode,
        "param": record.param,
        "message": record.message,
        "finish": record.finish,
        "tokens": {
            "prompt": record.prompt_tokens,
            "completion": record.completion_tokens,
            "cached": record.cached_tokens,
            "counted": record.tokens_sent,
        },
        "gaps": {"count": record.gaps, "within": record.gaps_within, "limit_s": record.gap_limit_s},
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "phases_ms": record.phases_ms(),
        "choices": [_choice(one) for one in record.choices],
        "events": [
            {"at_s": round(at_s, PLACES), "event": name, **{key: _plain(value) for key, value in details.items()}}
            for at_s, name, details in record.events
        ],
        "left_out": record.lost,
    }


def _choice(choice: Choice) -> dict[str, Any]:
    compared, predicted = {one.id for one in choice.compared}, choice.predicted_s()
    candidates = []
    for at, one in enumerate(choice.candidates):
        rank = choice.ranks[at] if choice.ranks else ()
        candidates.append(
            {
                "id": one.id,
                "path": choice.paths[at] if choice.paths else "",
                "load": round(one.load, 1),
                "per_s": round(one.rate, 1) or None,
                "cached_tokens": round(one.cached),
                "neighbours_s": [_rounded(s) for s in one.neighbours_s],
                "predicted_s": _rounded(predicted.get(one.id)) if choice.work != "decode" else None,
                "chosen": one.id in choice.chosen,
                "why_not": "" if one.id in compared else _why_not(rank, suspended=one.suspended),
            }
        )
    return {
        "at_s": round(choice.at_s, PLACES),
        "plan": choice.plan or None,
        "because": choice.because,
        "skipped": choice.skipped,
        "work": choice.work,
        "policy": choice.policy,
        "cost": round(choice.cost, 1),
        "chosen": list(choice.chosen),
        "why": _why(choice, predicted),
        "candidates": candidates,
    }


def _why_not(rank: tuple[int, ...], *, suspended: bool) -> str:
    """What spoke against a candidate before any load was looked at (`proxy/routing/plan.py`)."""
    burden, other_way, nobody_encodes = rank
    if burden >= 2:
        return "this request failed there, or at the instance that would go on after it"
    if burden:
        return "its circuit is open" if suspended else "the circuit of the instance that would go on is open"
    if other_way:
        return "the items are encoded already, and it would encode them itself"
    return "no encoder is up" if nobody_encodes else "put aside"


def _why(choice: Choice, predicted: dict[str, float]) -> str:
    """The reason in a few words."""
    compared = choice.compared
    if len(compared) == 1:
        aside = len(choice.candidates) - 1
        return f"the only one left, {aside} put aside" if aside else "the only one"
    if choice.work == "encode":
        return "each item where all are done soonest"
    if choice.policy in ("first-token", "least-loaded"):
        return _least(choice, predicted)
    return {
        "round-robin": "not picked for longest",
        "power-of-two": "the less loaded of two drawn at random",
        "most-cached": "most of the prompt cached, while its load is within the bound",
    }.get(choice.policy, choice.policy)


def _least(choice: Choice, predicted: dict[str, float]) -> str:
    if choice.policy == "first-token":
        what, values, unit = "predicted time", [1000 * s for s in predicted.values()], " ms"
    else:
        what, values, unit = "load", [one.load for one in choice.compared], ""
    first, second = (f"{value:.1f}{unit}" for value in sorted(values)[:2])
    if first == second:
        return f"equal {what}, {first}: its turn"
    return f"least {what}: {first}, the next {second}"


def _plain(value: Any) -> Any:
    return _rounded(value) if isinstance(value, float) else value


def _rounded(seconds: float | None) -> float | None:
    """None for what is unknown, or for ever."""
    return round(seconds, PLACES) if seconds is not None and math.isfinite(seconds) else None
