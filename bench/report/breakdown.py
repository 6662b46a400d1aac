"""The eight phases of a request by deployment (HydraInfer v1 Fig. 13, v2 Fig. 11; design §4). Pure.

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

from bench.client.joined import SEEN_BY_PROXY, SENT
from bench.client.row import Row
from bench.phases import DIRECT, DISAGGREGATED, MONOLITH
from bench.report.folder import RequestPhases


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


EIGHT = (
    Phase.ENCODE_QUEUE,
    Phase.ENCODE,
    Phase.EP_TRANSFER,
    Phase.PREFILL_QUEUE,
    Phase.PREFILL,
    Phase.PD_TRANSFER,
    Phase.DECODE_QUEUE,
    Phase.DECODE,
)
OF_ENCODING = frozenset({Phase.ENCODE_QUEUE, Phase.ENCODE, Phase.EP_TRANSFER, Phase.ENCODER})
OF_LANGUAGE = frozenset(
    {Phase.PREFILL_QUEUE, Phase.PREFILL, Phase.PD_TRANSFER, Phase.DECODE_QUEUE, Phase.WHOLE, Phase.FIRST_STEP}
)
_BY_EVENT = {
    **dict.fromkeys(("sent", "arrived", "media_loaded", "encode_sent", "dispatched", "first_content"), Phase.OUTSIDE),
    **dict.fromkeys(("encode_arrived", "encode_start"), Phase.ENCODE_QUEUE),
    "encoded": Phase.ENCODE,
    **dict.fromkeys(("feature_put", "feature_event", "feature_pinned", "encode_done"), Phase.EP_TRANSFER),
    **dict.fromkeys(
        ("decode_arrived", "decode_reserved", "prefill_arrived", "prefill_admitted", "prefill_start"),
        Phase.PREFILL_QUEUE,
    ),
    "prefill_end": Phase.PREFILL,
    "kv_done": Phase.PD_TRANSFER,
    **dict.fromkeys(("decode_received", "decode_start"), Phase.DECODE_QUEUE),
    "first_byte": Phase.FIRST_STEP,
}
_BY_NAME = {one.phase: _BY_EVENT[one.event] for one in (SENT, *DISAGGREGATED)}
_BY_NAME |= {
    one.phase: {"encode_done": Phase.ENCODER, "first_byte": Phase.WHOLE}.get(one.event, _BY_EVENT[one.event])
    for one in SEEN_BY_PROXY
}
_BY_NAME |= {one.phase: Phase.WHOLE for one in (*MONOLITH, *DIRECT) if one.phase not in _BY_NAME}
_BY_NAME |= {phase.value: phase for phase in Phase}
"""By the name that a file of phases has: the milestones' own, or one of the phases of this file."""


@dataclass(frozen=True)
class Breakdown:
    """Mean milliseconds of the requests of one run.

    Attributes:
        requests: whole answers whose phases are known. encoded: how many of them passed an encoder of its own.
        taken: by phase, those that took nothing too; their sum but for `DECODE` is about `ttft_ms`.
    """

    requests: int
    encoded: int
    ttft_ms: float
    e2e_ms: float
    taken: Mapping[Phase, float]

    def eight(self) -> dict[Phase, float]:
        """With the first step of decode in decode, as HydraInfer has it."""
        whole = dict(self.taken)
        whole[Phase.DECODE] = whole.get(Phase.DECODE, 0.0) + whole.pop(Phase.FIRST_STEP, 0.0)
        return whole


def phases_of(request: RequestPhases) -> dict[Phase, float]:
    """Milliseconds by phase of one request."""
    found: dict[Phase, float] = defaultdict(float)
    for name, ms in request.phases_ms.items():
        found[_BY_NAME.get(name, Phase.OTHER)] += ms
    if Phase.FIRST_STEP in found and not any(_is(name, Phase.PREFILL) for name in request.phases_ms):
        found[Phase.WHOLE] += found.pop(Phase.FIRST_STEP)  # a PD instance: it stamps no prefill, nor an end of it
        found[Phase.WHOLE] += found.pop(Phase.PREFILL_QUEUE, 0.0)
    return dict(found)


def breakdown(requests: Sequence[RequestPhases], rows: Sequence[Row]) -> Breakdown | None:
    """Of the requests of one run; None where none is known.

    Args:
        rows: of the same run; what came after the first token is from there.
    """
    by_id = {row.id: row for row in rows if row.ok}
    known = [(phases_of(one), by_id[one.id]) for one in requests if one.id in by_id]
    if not known:
        return None
    summed: dict[Phase, float] = defaultdict(float)
    for taken, row in known:
        for phase, ms in taken.items():
            summed[phase] += ms
        if Phase.DECODE not in taken and row.first_s is not None and row.last_s is not None:
            summed[Phase.DECODE] += (row.last_s - row.first_s) * 1e3
    return Breakdown(
        len(known),
        sum(not OF_ENCODING.isdisjoint(taken) for taken, _ in known),
        statistics.fmean((row.ttft_s or 0.0) * 1e3 for _, row in known),
        statistics.fmean(row.e2e_s * 1e3 for _, row in known),
        {phase: summed[phase] / len(known) for phase in Phase if phase in summed},
    )


Found = Mapping[str, Mapping[float, Breakdown]]
"""By entry's name and rate."""


@dataclass(frozen=True)
class Part:
    """A part of the TTFT that two breakdowns can both tell from the rest: one phase, or several together."""

    phases: frozenset[Phase]
    name: str
    own_ms: float
    other_ms: float


def comparable(one: Breakdown, other: Breakdown) -> list[Part]:
    """The parts of the TTFT that both can tell apart, in path order.

    What one of them knows as one piece only is one piece of both.
    """
    blocks: list[set[Phase]] = [{phase} for phase in Phase if phase is not Phase.DECODE]
    for these in (one.taken, other.taken):
        if these.get(Phase.ENCODER):
            blocks = _joined(blocks, OF_ENCODING)
        if these.get(Phase.WHOLE):
            blocks = _joined(blocks, OF_LANGUAGE)
    encodes = [any(these.get(phase) for phase in OF_ENCODING) for these in (one.taken, other.taken)]
    if encodes[0] != encodes[1]:  # one has its encoder in an instance with other stages
        blocks = _joined(blocks, OF_ENCODING | {Phase.PREFILL_QUEUE, Phase.PREFILL})
    found = []
    for block in blocks:
        mine, theirs = (sum(these.get(phase, 0.0) for phase in block) for these in (one.taken, other.taken))
        if mine or theirs:
            found.append(Part(frozenset(block), _name(block, one, other), mine, theirs))
    return found


def _joined(blocks: Sequence[set[Phase]], together: frozenset[Phase]) -> list[set[Phase]]:
    """Blocks that share a phase with `together` become one, at the place of the first."""
    merged = set().union(*(block for block in blocks if block & together))
    found: list[set[Phase]] = []
    for block in blocks:
        if not block & together:
            found.append(block)
        elif merged not in found:
            found.append(merged)
    return found


def _name(block: set[Phase], one: Breakdown, other: Breakdown) -> str:
    if len(block) == 1:
        return next(iter(block)).value
    parts = [phase for phase in Phase if phase in block and phase not in (Phase.WHOLE, Phase.ENCODER)]
    if OF_ENCODING - {Phase.ENCODER} <= block and OF_LANGUAGE - {Phase.WHOLE} <= block:
        return "all that stages do until the first token"
    there = [phase for phase in parts if one.taken.get(phase) or other.taken.get(phase)] or parts
    return there[0].value if len(there) == 1 else f"{there[0].value} to {there[-1].value} together"


def _is(name: str, phase: Phase) -> bool:
    return _BY_NAME.get(name) is phase
