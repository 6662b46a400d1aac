"""A request's line in `phases.jsonl`: what proxy and stages stamped, and what its client saw around that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.clients.results import RequestRecord
from bench.phases import line
from epd_serve.phases.join import between, spans_of_stamps
from epd_serve.phases.phase import Phase, Span
from epd_serve.phases.stamps import Stamp, Timeline
from epd_serve.trace import PROXY


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
