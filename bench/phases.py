"""From the stamps of one request to the phases of its TTFT. Pure.

Milestones are listed in the order in which they lie on the path of a request. A phase runs from the latest milestone
so far to its own: work that was hidden behind something slower counts nothing, and the phases add up to the TTFT.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Milestone:
    """A phase ends with `event`; `phase` names it, `group` is the row of the short table it belongs to."""

    event: str
    phase: str
    group: str


DISAGGREGATED = (
    Milestone("arrived", "client to proxy", "proxy"),
    Milestone("media_loaded", "parse, load and check the picture", "proxy"),
    Milestone("encode_sent", "make E's request", "proxy"),
    Milestone("encode_arrived", "E: HTTP, preprocessing, to the scheduler", "encode"),
    Milestone("encode_start", "E: scheduled", "encode"),
    Milestone("encoded", "E: vision tower", "encode"),
    Milestone("feature_put", "E: put into the arena", "encode"),
    Milestone("feature_event", "event reaches P", "event"),
    Milestone("feature_pinned", "P verifies and pins", "prefetch"),
    Milestone("encode_done", "E: finish the step, answer", "encode"),
    Milestone("dispatched", "make P's and D's requests", "proxy"),
    Milestone("decode_arrived", "D: HTTP, preprocessing, to the scheduler", "prefill"),
    Milestone("decode_reserved", "D: reserve blocks", "prefill"),
    Milestone("prefill_arrived", "P: HTTP, preprocessing, to the scheduler", "prefill"),
    Milestone("prefill_admitted", "P: wait for D's blocks", "prefill"),
    Milestone("prefill_start", "P: feature at hand, scheduled", "prefill"),
    Milestone("prefill_end", "P: forward pass", "prefill"),
    Milestone("kv_done", "KV after the end of prefill (exposed)", "KV"),
    Milestone("decode_received", "D: notice", "first decode"),
    Milestone("decode_start", "D: scheduled", "first decode"),
    Milestone("first_byte", "D: forward pass, answer", "first decode"),
    Milestone("first_content", "proxy to client", "proxy"),
)
MONOLITH = (
    Milestone("arrived", "client to proxy", "proxy"),
    Milestone("media_loaded", "parse, load and check the picture", "proxy"),
    Milestone("dispatched", "make the request", "proxy"),
    Milestone("first_byte", "vLLM", "vLLM"),
    Milestone("first_content", "proxy to client", "proxy"),
)
DIRECT = (Milestone("first_content", "vLLM", "vLLM"),)
SENT = Milestone("sent", "generator: late, connecting", "generator")
OF_STAGES = frozenset({"encode_start", "prefill_start", "decode_start"})
SEEN_BY_PROXY = (
    Milestone("arrived", "client to proxy", "proxy"),
    Milestone("media_loaded", "parse, load and check the media", "proxy"),
    Milestone("encode_sent", "make E's requests", "proxy"),
    Milestone("encode_done", "E, with its queue", "encode"),
    Milestone("dispatched", "make the requests of the other stages", "proxy"),
    Milestone("first_byte", "prefill and first decode, with their queues", "prefill"),
    Milestone("first_content", "proxy to client", "proxy"),
)
"""Where only the proxy stamps: before a monolith, and before simulated stages."""
HIDDEN = (
    ("put to event at P", "feature_put", "feature_event"),
    ("event to pinned", "feature_event", "feature_pinned"),
    ("pinned to P wants it", "feature_pinned", "prefill_arrived"),
    ("E's answer after the put", "feature_put", "encode_done"),
    ("dispatch to P's scheduler", "dispatched", "prefill_arrived"),
    ("dispatch to D's scheduler", "dispatched", "decode_arrived"),
    ("D reserved to P admitted", "decode_reserved", "prefill_admitted"),
    ("P's scheduler to D's blocks", "prefill_arrived", "decode_reserved"),
    ("KV latency (prefill start to done)", "prefill_start", "kv_done"),
)
"""Durations between two stamps whether or not anything waited for them; negative when they overlap."""


def phases(milestones: Sequence[Milestone], events: Mapping[str, float], sent: float) -> dict[str, float]:
    """Seconds per phase, in path order. Their sum is the time of the last milestone minus `sent`.

    Milestones without a stamp, and an answer of E that nothing waited for, give no phase.
    """
    taken: dict[str, float] = {}
    now = sent
    for milestone in milestones:
        at = events.get(milestone.event)
        if at is None or (milestone.event == "encode_done" and at > events.get("dispatched", at)):
            continue
        taken[milestone.phase] = max(0.0, at - now)
        now = max(now, at)
    return taken


def groups(milestones: Sequence[Milestone], taken: Mapping[str, float]) -> dict[str, float]:
    """The phases summed into the rows of the short table, in path order."""
    summed: dict[str, float] = {}
    for milestone in milestones:
        summed[milestone.group] = summed.get(milestone.group, 0.0) + taken.get(milestone.phase, 0.0)
    return summed


def hidden(events: Mapping[str, float]) -> dict[str, float]:
    """The durations of `HIDDEN` whose two stamps exist."""
    return {name: events[end] - events[start] for name, start, end in HIDDEN if start in events and end in events}


def mean_phases(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of phases and groups over joined rows."""
    if not rows:
        return {}
    by_kind = {kind: means([row[kind] for row in rows]) for kind in ("phases_ms", "groups_ms")}
    rounded = {kind: {name: round(ms, 3) for name, ms in values.items()} for kind, values in by_kind.items()}
    return {"joined": len(rows), **rounded}


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name over all rows; a row without it spent nothing in it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.fmean(row.get(name, 0.0) for row in rows) for name in names}
