"""A record in other forms, for other programs. Pure.

As JSON, for `epd-serve why`: what choices went by, how its time was spent (`report`). As the phase stamps of a request
that has ended (`--trace-dir`): the lines that `epd_serve/phases` joins with those of the stages (`stamps`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxy.records.record import Choice, Record

PLACES = 6
IN_LIST = ("id", "client_id", "began", "endpoint", "path", "code", "attempts", "retried", "migrations")
IN_FULL = (
    "clock", "tenant", "model", "stream", "answers", "encode", "prefill", "decode", "param", "message", "finish",
    "bytes_in", "bytes_out",
)  # fmt: skip
"""Fields of a record that are told as they are."""
_TOLD = {
    "received": (), "dispatched": ("path", "transfer"), "decode_sent": (), "prefilled": ("outcome",),
    "first_byte": ("stage",),
}  # fmt: skip
"""Events that are stamps as they stand, and which of their details are."""

LINES = {"encode": "an encoder", "serve": "prefill and decode"}
"""What is waited for in each line (`proxy/admission/queue.py`)."""
_OF_WAITS = ("paused", "before_s", "slo_s", "service_s", "slack_s", "over_share")


def summary(record: Record) -> dict[str, Any]:
    """One line of a list."""
    return {
        **{name: getattr(record, name) for name in IN_LIST},
        "items": record.media,
        "outcome": record.outcome or "running",
        "status": record.status or None,
        "first_byte_s": _rounded(record.first_byte_s),
        "total_s": _rounded(record.total_s),
    }


def report(record: Record) -> dict[str, Any]:
    """All of it."""
    prompt, completion, cached = record.prompt_tokens, record.completion_tokens, record.cached_tokens
    return {
        **summary(record),
        **{name: getattr(record, name) for name in IN_FULL},
        "trace_id": record.trace.trace_id if record.trace is not None else "",
        "tokens": {"prompt": prompt, "completion": completion, "cached": cached, "counted": record.tokens_sent},
        "gaps": {"count": record.gaps, "within": record.gaps_within, "limit_s": record.gap_limit_s},
        "phases_ms": record.phases_ms(),
        "waits": _waits(record),
        "choices": [_choice(one) for one in record.choices],
        "events": [
            {
                "at_s": round(at_s, PLACES),
                "event": name,
                **{key: _rounded(value) for key, value in details.items() if key not in (*_OF_WAITS, "passed")},
            }
            for at_s, name, details in record.events
        ],
        "left_out": record.lost,
    }


def _waits(record: Record) -> list[dict[str, Any]]:
    """Each wait in a line, with what was known when it began; `s` is None while it lasts."""
    waits: list[dict[str, Any]] = []
    for _, name, details in record.events:
        if name == "waits" and "before_s" in details:
            known = {key: _rounded(details[key]) for key in _OF_WAITS}
            waits.append({"line": details["line"], "for": LINES[details["line"]], "s": None, **known, "passed": 0})
        elif name == "queued" and waits:
            waits[-1] |= {"s": _rounded(details["s"]), "passed": details["passed"]}
    for one in waits:
        one["why"] = "; ".join(_why_waits(one))
    return waits


def _why_waits(wait: Mapping[str, Any]) -> Iterator[str]:
    if wait["paused"]:
        yield "new requests were held back"
    yield f"{wait['before_s']:.2f} s of work before it"
    if (slack_s := wait["slack_s"]) is not None:
        itself = f"its first token within {wait['slo_s']:.2f} s, of which it needs {wait['service_s']:.2f} s itself"
        late = f"{-slack_s:.2f} s too late for that, so it lets those go first that are in time"
        yield f"{itself}: {late if slack_s < 0 else f'{slack_s:.2f} s of slack left'}"
        if wait["s"] is not None and wait["s"] > slack_s >= 0:
            yield f"its turn came {wait['s'] - slack_s:.2f} s too late for that"
    if wait["over_share"]:
        yield "its account was over its share then, so others went first"
    if wait["passed"]:
        yield f"overtaken by {wait['passed']} that had room"


def _choice(choice: Choice) -> dict[str, Any]:
    compared, predicted = {one.id for one in choice.compared}, choice.predicted_s()
    nothing = [()] * len(choice.candidates)
    ways = zip(choice.candidates, choice.paths or nothing, choice.ranks or nothing, strict=True)
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
        "candidates": [
            {
                "id": one.id,
                "path": path or "",
                "load": round(one.load, 1),
                "per_s": round(one.rate, 1) or None,
                "cached_tokens": round(one.cached),
                "neighbours_s": [_rounded(s) for s in one.neighbours_s],
                "predicted_s": _rounded(predicted.get(one.id)) if choice.work != "decode" else None,
                "chosen": one.id in choice.chosen,
                "why_not": "" if one.id in compared else _why_not(rank, suspended=one.suspended),
            }
            for one, path, rank in ways
        ],
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
    loads = [one.load for one in compared]
    reasons = {
        "first-token": _least("predicted time", [1000 * s for s in predicted.values()], " ms"),
        "least-loaded": _least("load", loads, ""),
        "round-robin": "not picked for longest",
        "power-of-two": "the less loaded of two drawn at random",
        "most-cached": "most of the prompt cached, while its load is within the bound",
    }
    return reasons.get(choice.policy, choice.policy)


def _least(what: str, values: list[float], unit: str) -> str:
    first, second = (f"{value:.1f}{unit}" for value in sorted(values)[:2])
    return f"equal {what}, {first}: its turn" if first == second else f"least {what}: {first}, the next {second}"


def _rounded(value: Any) -> Any:
    """None for a time that is for ever; what is no time as it is."""
    if not isinstance(value, float):
        return value
    return round(value, PLACES) if math.isfinite(value) else None


def stamps(record: Record, keys: Sequence[str]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Each an event, when it happened by `time.monotonic`, and more. `keys`: of its items."""
    yield "arrived", record.clock, {"client_id": record.client_id} if record.client_id else {}
    queued_s = 0.0
    for at_s, event, details in record.events:
        t, s = record.clock + at_s, details.get("s", 0.0)
        if event in _TOLD:
            yield event, t, {name: details[name] for name in _TOLD[event] if details.get(name)}
        elif event == "encode_call":
            yield "encode_sent", t - s, {"to": details["stage"]}
            yield "encode_done", t, {"by": details["stage"], "outcome": details["outcome"]}
        elif event in ("downloaded", "encoded"):
            yield event, t, {"t0": t - s}
        elif event == "media":
            yield event, t, {"keys": list(keys)}
        elif event == "queued" and details["line"] == "serve":
            queued_s = s
        elif event == "admitted":
            yield event, t, {"t0": t - queued_s}
    yield "done", record.clock + record.total_s, {"outcome": record.outcome}
