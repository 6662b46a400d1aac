"""Rows joined with the phase stamps of proxy and stages: where the time to first token of each request went. Pure.

The generator's request id is in the proxy's stamp `arrived`; both read CLOCK_MONOTONIC, so this holds on one host only.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.client.row import Row
from bench.phases import DISAGGREGATED, Milestone, groups, phases
from bench.stamps import Timeline

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


def joined(row: Row, timeline: Timeline) -> dict[str, Any] | None:
    """Milliseconds per phase and group of the request's TTFT; they add up to it but for `residual_ms`.

    None where it has no first token, or the stamps do not know it.
    """
    events = timeline.named(row.id)
    if not events or row.first_s is None or row.sent_s is None or row.ttft_s is None:
        return None
    path = (SENT, *(DISAGGREGATED if OF_STAGES & events.keys() else SEEN_BY_PROXY))
    taken = phases(path, {**events, "sent": row.sent_s, "first_content": row.first_s}, row.due_s)
    return {
        "id": row.id,
        "run": row.run,
        "path": row.path,
        "phases_ms": {name: round(seconds * 1e3, 3) for name, seconds in taken.items()},
        "groups_ms": {name: round(seconds * 1e3, 3) for name, seconds in groups(path, taken).items()},
        "residual_ms": round((row.ttft_s - sum(taken.values())) * 1e3, 3),
    }


def mean_phases(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of phases and groups over joined rows; a request without a phase spent nothing in it."""
    if not rows:
        return {}
    found: dict[str, Any] = {"joined": len(rows)}
    for kind in ("phases_ms", "groups_ms"):
        names = dict.fromkeys(name for row in rows for name in row[kind])
        found[kind] = {name: round(statistics.fmean(row[kind].get(name, 0.0) for row in rows), 3) for name in names}
    return found
