"""The eight phases of a request by deployment (HydraInfer v1 Fig. 13, v2 Fig. 11; EPD-Serve §4.1). Pure.

    encode queue, encode, E→P transfer, prefill queue, prefill, P→D transfer, decode queue, decode

They come from the stamps of proxy and stages (`bench/phases.py`): each lasts from the latest stamp so far to its own,
so what was hidden behind something slower counts nothing, and the phases of the TTFT add up to it. Decode is its first
step, of the TTFT, and all tokens after it. Beside the eight there is what proxy and client took. An instance that runs
several stages stamps nothing between them, and simulated stages stamp nothing: their time is one piece, and said to be.
In EP, prefill includes encode.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.clients.records import RequestRecord
from bench.phases import DIRECT, DISAGGREGATED, MONOLITH, SEEN_BY_PROXY, SENT


class Phase(StrEnum):
    """In the order of a request's path."""

    OUTSIDE = "proxy and client"
    ENCODE_QUEUE = "encode queue"
    ENCODE = "encode"
    EP_TRANSFER = "E→P transfer"
    ENCODER = "encode with its queue, not told apart"
    PREFILL_QUEUE = "prefill queue"
    PREFILL = "prefill"
    PD_TRANSFER = "P→D transfer"
    DECODE_QUEUE = "decode queue"
    WHOLE = "stages not told apart"
    FIRST_STEP = "decode, first step"
    DECODE = "decode"
    OTHER = "other"


ENCODING = (Phase.ENCODE_QUEUE, Phase.ENCODE, Phase.EP_TRANSFER, Phase.ENCODER)
_EVENTS = {
    Phase.OUTSIDE: ("sent", "arrived", "media_loaded", "encode_sent", "dispatched", "first_content"),
    Phase.ENCODE_QUEUE: ("encode_arrived", "encode_start"),
    Phase.ENCODE: ("encoded",),
    Phase.EP_TRANSFER: ("feature_put", "feature_event", "feature_pinned", "encode_done"),
    Phase.PREFILL_QUEUE: ("decode_arrived", "decode_reserved", "prefill_arrived", "prefill_admitted", "prefill_start"),
    Phase.PREFILL: ("prefill_end",),
    Phase.PD_TRANSFER: ("kv_done",),
    Phase.DECODE_QUEUE: ("decode_received", "decode_start"),
    Phase.FIRST_STEP: ("first_byte",),
}
_BY_EVENT = {event: phase for phase, events in _EVENTS.items() for event in events}
_FUSED = {"encode_done": Phase.ENCODER, "first_byte": Phase.WHOLE}
"""Events whose phase is another one where only the proxy stamps."""
_BY_NAME: dict[str, Phase] = {one.phase: Phase.WHOLE for one in (*MONOLITH, *DIRECT)}
_BY_NAME |= {one.phase: _BY_EVENT[one.event] for one in (SENT, *DISAGGREGATED)}
_BY_NAME |= {one.phase: (_BY_EVENT | _FUSED)[one.event] for one in SEEN_BY_PROXY}
_BY_NAME |= {phase.value: phase for phase in Phase}
"""By the name that a file of phases has: the milestones' own, or one of the phases of this file."""


@dataclass(frozen=True, slots=True)
class RequestPhases:
    """Where the time to first token of one request went: milliseconds by phase."""

    id: str
    run: str
    taken: Mapping[Phase, float]


@dataclass(frozen=True)
class Breakdown:
    """Mean milliseconds of the requests of one run.

    Attributes:
        requests: whole answers whose phases are known. encoded: how many of them passed an encoder of its own.
        taken: by phase; their sum but for `DECODE` is about `ttft_ms`.
    """

    requests: int
    encoded: int
    ttft_ms: float
    e2e_ms: float
    taken: Mapping[Phase, float]

    def eight(self) -> dict[Phase, float]:
        """With the first step of decode in decode, as HydraInfer has it."""
        joined = dict(self.taken)
        joined[Phase.DECODE] = joined.get(Phase.DECODE, 0.0) + joined.pop(Phase.FIRST_STEP, 0.0)
        return joined


def request_phases(plain: Mapping[str, Any]) -> RequestPhases:
    """A line of `phases.jsonl`. Raises KeyError, TypeError or ValueError where it is none."""
    taken: dict[Phase, float] = defaultdict(float)
    for name, ms in plain["phases_ms"].items():
        taken[_BY_NAME.get(name, Phase.OTHER)] += float(ms)
    if Phase.FIRST_STEP in taken and Phase.PREFILL not in taken:  # a PD instance stamps no end of prefill
        taken[Phase.WHOLE] += taken.pop(Phase.FIRST_STEP) + taken.pop(Phase.PREFILL_QUEUE, 0.0)
    return RequestPhases(str(plain["id"]), str(plain["run"]), dict(taken))


def breakdown(requests: Sequence[RequestPhases], rows: Sequence[RequestRecord]) -> Breakdown | None:
    """Of the requests of one run; None where none is known.

    Args:
        rows: of the same run; what came after the first token is from there.
    """
    by_id = {row.id: row for row in rows if row.ok}
    known = [(one.taken, by_id[one.id]) for one in requests if one.id in by_id]
    if not known:
        return None
    summed: dict[Phase, float] = defaultdict(float)
    for taken, row in known:
        after_s = row.last_s - row.first_s if row.first_s is not None and row.last_s is not None else 0.0
        for phase, ms in {Phase.DECODE: after_s * 1e3, **taken}.items():
            summed[phase] += ms
    return Breakdown(
        len(known),
        sum(not taken.keys().isdisjoint(ENCODING) for taken, _ in known),
        statistics.fmean((row.ttft_s or 0.0) * 1e3 for _, row in known),
        statistics.fmean(row.e2e_s * 1e3 for _, row in known),
        {phase: summed[phase] / len(known) for phase in Phase if phase in summed},
    )
