"""The join: from the stamps of one request, of proxy and stages, to the phases it went through. Pure.

Nothing is guessed: a phase lacks where one of its two stamps does, and its time is then nobody's. Stamps are made in
`proxy`, in `epd_serve/engine/request_trace.py` (any stage) and in `epd_serve/engine/ec` and `kv` (features, KV).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.clients.results import RequestRecord
from bench.phases import Phase, Span, line
from bench.stamps import Stamp, Timeline
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
    seen = _Seen(stamps)
    found = [
        *_between(Phase.CLIENT, record.due_s, record.sent_s),
        *_between(Phase.DECODE, first, last),
        *_proxy(seen),
        *_encode(seen),
        *_features(seen),
        *_prefill(seen),
        *_decode(seen),
    ]
    if seen.of("proxy", "arrived"):
        found += _between(Phase.HTTP_CLIENT, record.sent_s, seen.first("proxy", "received"))
        found += _between(Phase.HTTP_CLIENT, seen.last("proxy", "first_byte"), first)
    else:  # a stage was asked past the proxy
        found += _between(Phase.HTTP_CLIENT, record.sent_s, seen.first("P", "received"))
        found += _between(Phase.HTTP_CLIENT, seen.first("P", "answering"), first)
    return [
        Span(max(span.begin, record.due_s), min(span.end, last), span.phase)
        for span in found
        if min(span.end, last) > max(span.begin, record.due_s)
    ]


ENTERED = "entered"
"""A request is the engine's once it has been sent to it: the scheduler takes it only after the step that runs. The API
server may come to say so later than the scheduler."""


class _Seen:
    """Stamps of one request by whose they are: the proxy's, or a stage's, E, P or D. Of several attempts at prefill and
    decode only the last one's count."""

    def __init__(self, stamps: Sequence[Stamp]) -> None:
        self._stamps: dict[tuple[str, str], list[Stamp]] = defaultdict(list)
        attempt = max((stamp.t for stamp in stamps if stamp.event == "dispatched"), default=0.0)
        for stamp in stamps:
            stage = _stage(stamp.instance)
            if stage in ("proxy", "E") or stamp.t >= attempt or stamp.event == "feature_pinned":
                self._stamps[stage, stamp.event].append(stamp)
        for stage in "EPD":
            self._stamps[stage, ENTERED] = list(_earlier(self.of(stage, "handed_over"), self.of(stage, "queued")))

    def of(self, stage: str, event: str) -> list[Stamp]:
        return self._stamps.get((stage, event), [])

    def times(self, stage: str, event: str) -> list[float]:
        return [stamp.t for stamp in self.of(stage, event)]

    def first(self, stage: str, event: str) -> float | None:
        return next(iter(self.times(stage, event)), None)

    def last(self, stage: str, event: str) -> float | None:
        return next(reversed(self.times(stage, event)), None)

    def lasting(self, phase: Phase, stage: str, event: str) -> list[Span]:
        """Of an event that says since when."""
        return [Span(float(stamp.more["t0"]), stamp.t, phase) for stamp in self.of(stage, event)]

    def calls(self, phase: Phase, stage: str, begin: str, end: str) -> list[Span]:
        """From the n-th of one event to the n-th of the other, at each instance."""
        found = []
        for instance in sorted({stamp.instance for stamp in self.of(stage, begin)}):
            begins, ends = (
                [one.t for one in self.of(stage, event) if one.instance == instance] for event in (begin, end)
            )
            found += [Span(*times, phase) for times in zip(begins, ends, strict=False)]
        return found


def _earlier(one: Sequence[Stamp], other: Sequence[Stamp]) -> Iterator[Stamp]:
    """Of the n-th of both at each instance."""
    for instance in {stamp.instance for stamp in (*one, *other)}:
        pairs = itertools.zip_longest(*([each for each in part if each.instance == instance] for part in (one, other)))
        yield from (min(filter(None, pair), key=lambda stamp: stamp.t) for pair in pairs)


def _stage(instance: str) -> str:
    if instance == PROXY:
        return PROXY
    role = instance.rstrip("0123456789")
    return role if role in ("E", "D") else "P"


def _between(phase: Phase, begin: float | None, end: float | None) -> list[Span]:
    """None where a stamp lacks, or where the end came first: nothing waited then."""
    return [Span(begin, end, phase)] if begin is not None and end is not None and end > begin else []


def _without(spans: Iterable[Span], cuts: Iterable[Span]) -> list[Span]:
    """What is left of spans outside of others."""
    left = list(spans)
    for cut in cuts:
        left = [
            part
            for span in left
            for part in (
                Span(span.begin, min(span.end, cut.begin), span.phase),
                Span(max(span.begin, cut.end), span.end, span.phase),
            )
            if part.end > part.begin
        ]
    return left


def _proxy(seen: _Seen) -> Iterator[Span]:
    """The proxy's own work is what lies between the things it waits for."""
    waits = seen.lasting(Phase.DOWNLOAD, "proxy", "downloaded") + seen.lasting(Phase.PROXY_QUEUE, "proxy", "admitted")
    asked, answered = seen.first("proxy", "encode_sent"), seen.last("proxy", "encode_done")
    if asked is None:  # nothing is to be encoded, or another request has it encoded
        waits += seen.lasting(Phase.ENCODE_QUEUE, "proxy", "encoded")
    yield from waits
    encoded = seen.last("proxy", "encoded")
    if answered is not None and encoded is not None:
        waits += _between(Phase.HTTP_E, asked, min(answered, encoded))
    attempts = seen.times("proxy", "dispatched")
    if attempts:
        yield from _without(_between(Phase.PROXY, seen.first("proxy", "received"), attempts[0]), waits)
        yield from _between(Phase.FAILED, attempts[0], attempts[-1])
    if not any(seen.of(stage, "received") for stage in "EPD"):
        yield from _between(Phase.STAGES, asked, answered)
        yield from _between(Phase.STAGES, seen.last("proxy", "dispatched"), seen.last("proxy", "first_byte"))


def _front_end(seen: _Seen, stage: str, preprocess: Phase, queue: Phase) -> Iterator[Span]:
    media = seen.lasting(Phase.DECODE_MEDIA, stage, "decoded")
    yield from media
    yield from _without(seen.calls(preprocess, stage, "received", ENTERED), media)
    if stage != "D":
        yield from seen.calls(queue, stage, ENTERED, "scheduled")


def _encode(seen: _Seen) -> Iterator[Span]:
    yield from _front_end(seen, "E", Phase.PREPROCESS_E, Phase.ENCODE_QUEUE)
    encoded = seen.of("E", "encoded")
    steps = seen.calls(Phase.ENCODE, "E", "scheduled", "computed")
    for step, answer in zip(steps, seen.calls(Phase.ANSWER_E, "E", "computed", "answering"), strict=False):
        own = [stamp.t for stamp in encoded if step.begin <= stamp.t <= step.end]
        after = [stamp.t for stamp in encoded if stamp.t > step.end]  # an accelerator is behind its scheduler
        end = max(own) if own else min(after, default=step.end)
        yield from (Span(step.begin, end, Phase.ENCODE), Span(end, answer.end, Phase.ANSWER_E))
    if not seen.of("E", "scheduled"):
        yield from seen.calls(Phase.ENCODE, "E", "encode_start", "encoded")  # for another request with the same item
    for instance in {str(stamp.more["to"]): None for stamp in seen.of("proxy", "encode_sent")}:
        asked = [stamp.t for stamp in seen.of("proxy", "encode_sent") if stamp.more["to"] == instance]
        here = [stamp.t for stamp in seen.of("E", "received") if stamp.instance == instance]
        for times in zip(asked, here, strict=False):
            yield from _between(Phase.HTTP_E, *times)
    for done in seen.of("proxy", "encode_done"):
        left = [one.t for one in seen.of("E", "answering") if one.instance == done.more["by"] and one.t <= done.t]
        yield from _between(Phase.HTTP_E, max(left, default=None), done.t)


def _features(seen: _Seen) -> Iterator[Span]:
    encoded = {stamp.subject: stamp.t for stamp in seen.of("E", "encoded")}
    pinned = {stamp.subject: stamp.t for stamp in reversed(seen.of("P", "feature_pinned"))}
    for key, at in pinned.items():
        yield from _between(Phase.EP, encoded.get(key, seen.first("P", ENTERED)), at)
    yield from seen.lasting(Phase.EP, "P", "feature_loaded")


def _prefill_answers(seen: _Seen) -> bool:
    """Whether the client's first token is of whoever prefilled."""
    shown = seen.of("proxy", "first_byte")
    return not seen.of("D", "received") or (bool(shown) and _stage(str(shown[-1].more.get("stage", "D"))) == "P")


def _prefill(seen: _Seen) -> Iterator[Span]:
    answers = _prefill_answers(seen)
    end = "prefill_end" if seen.of("P", "prefill_end") and not answers else "computed"
    loads = seen.lasting(Phase.EP, "P", "feature_loaded")
    yield from _between(Phase.HTTP_P, seen.last("proxy", "dispatched"), seen.first("P", "received"))
    yield from _front_end(seen, "P", Phase.PREPROCESS_P, Phase.PREFILL_QUEUE)
    yield from _without(seen.calls(Phase.PREFILL, "P", "scheduled", end), loads)
    if answers:
        yield from seen.calls(Phase.ANSWER_P, "P", "computed", "answering")
        yield from _between(Phase.HTTP_P, seen.first("P", "answering"), seen.last("proxy", "first_byte"))


def _decode(seen: _Seen) -> Iterator[Span]:
    yield from seen.lasting(Phase.PD, "P", "kv_packet")
    yield from _between(Phase.PD, seen.last("P", "prefill_end"), seen.last("D", "kv_done"))
    called = seen.last("proxy", "decode_sent") or seen.last("proxy", "dispatched")
    yield from _between(Phase.HTTP_D, called, seen.first("D", "received"))
    yield from _front_end(seen, "D", Phase.PREPROCESS_D, Phase.DECODE_QUEUE)
    yield from seen.calls(Phase.DECODE_QUEUE, "D", ENTERED, "decode_reserved")
    yield from seen.calls(Phase.DECODE_QUEUE, "D", "kv_done", "scheduled")
    yield from seen.calls(Phase.FIRST_TOKEN, "D", "scheduled", "computed")
    yield from seen.calls(Phase.ANSWER_D, "D", "computed", "answering")
    yield from _between(Phase.HTTP_D, seen.first("D", "answering"), seen.last("proxy", "first_byte"))
