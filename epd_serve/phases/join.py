"""The join: from the stamps of one request, of proxy and stages, to the phases it went through. Pure.

Nothing is guessed: a phase lacks where one of its two stamps does, and its time is then nobody's. Stamps are made in
`proxy`, in `epd_serve/engine/request_trace.py` (any stage) and in `epd_serve/engine/ec` and `kv` (features, KV).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from epd_serve.phases.phase import Phase, Span
from epd_serve.phases.stamps import Stamp
from epd_serve.trace import PROXY


def spans_of_stamps(stamps: Sequence[Stamp]) -> list[Span]:
    """What proxy and stages tell of a request, each span with whose it is. What only its client knows is not there.

    Args:
        stamps: of its life, oldest first (`Timeline.stamps`).
    """
    seen = _Seen(stamps)
    return [*_proxy(seen), *_encode(seen), *_features(seen), *_prefill(seen), *_decode(seen)]


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

    def where(self, stage: str) -> str:
        """Which instance has the request as this stage, "" where none has stamped it."""
        return next((stamp.instance for stamp in reversed(self.of(stage, "received"))), "")

    def lasting(self, phase: Phase, stage: str, event: str) -> list[Span]:
        """Of an event that says since when."""
        return [Span(float(stamp.more["t0"]), stamp.t, phase, stamp.instance) for stamp in self.of(stage, event)]

    def calls(self, phase: Phase, stage: str, begin: str, end: str) -> list[Span]:
        """From the n-th of one event to the n-th of the other, at each instance."""
        found = []
        for instance in sorted({stamp.instance for stamp in self.of(stage, begin)}):
            begins, ends = (
                [one.t for one in self.of(stage, event) if one.instance == instance] for event in (begin, end)
            )
            found += [Span(*times, phase, instance) for times in zip(begins, ends, strict=False)]
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


def between(phase: Phase, begin: float | None, end: float | None, instance: str = "") -> list[Span]:
    """None where a stamp lacks, or where the end came first: nothing waited then."""
    return [Span(begin, end, phase, instance)] if begin is not None and end is not None and end > begin else []


def _without(spans: Iterable[Span], cuts: Iterable[Span]) -> list[Span]:
    """What is left of spans outside of others."""
    left = list(spans)
    for cut in cuts:
        left = [
            part
            for span in left
            for part in (
                Span(span.begin, min(span.end, cut.begin), span.phase, span.instance),
                Span(max(span.begin, cut.end), span.end, span.phase, span.instance),
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
        waits += between(Phase.HTTP_E, asked, min(answered, encoded))
    attempts = seen.times("proxy", "dispatched")
    if attempts:
        yield from _without(between(Phase.PROXY, seen.first("proxy", "received"), attempts[0], PROXY), waits)
        yield from between(Phase.FAILED, attempts[0], attempts[-1], PROXY)
    if not any(seen.of(stage, "received") for stage in "EPD"):
        yield from between(Phase.STAGES, asked, answered, PROXY)
        yield from between(Phase.STAGES, seen.last("proxy", "dispatched"), seen.last("proxy", "first_byte"), PROXY)


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
        yield Span(step.begin, end, Phase.ENCODE, step.instance)
        yield Span(end, answer.end, Phase.ANSWER_E, step.instance)
    if not seen.of("E", "scheduled"):
        yield from seen.calls(Phase.ENCODE, "E", "encode_start", "encoded")  # for another request with the same item
    for instance in {str(stamp.more["to"]): None for stamp in seen.of("proxy", "encode_sent")}:
        asked = [stamp.t for stamp in seen.of("proxy", "encode_sent") if stamp.more["to"] == instance]
        here = [stamp.t for stamp in seen.of("E", "received") if stamp.instance == instance]
        for times in zip(asked, here, strict=False):
            yield from between(Phase.HTTP_E, *times, instance)
    for done in seen.of("proxy", "encode_done"):
        left = [one.t for one in seen.of("E", "answering") if one.instance == done.more["by"] and one.t <= done.t]
        yield from between(Phase.HTTP_E, max(left, default=None), done.t, str(done.more["by"]))


def _features(seen: _Seen) -> Iterator[Span]:
    encoded = {stamp.subject: stamp.t for stamp in seen.of("E", "encoded")}
    pinned = {stamp.subject: stamp for stamp in reversed(seen.of("P", "feature_pinned"))}
    for key, pin in pinned.items():
        yield from between(Phase.EP, encoded.get(key, seen.first("P", ENTERED)), pin.t, pin.instance)
    yield from seen.lasting(Phase.EP, "P", "feature_loaded")


def _prefill_answers(seen: _Seen) -> bool:
    """Whether the client's first token is of whoever prefilled."""
    shown = seen.of("proxy", "first_byte")
    return not seen.of("D", "received") or (bool(shown) and _stage(str(shown[-1].more.get("stage", "D"))) == "P")


def _prefill(seen: _Seen) -> Iterator[Span]:
    answers = _prefill_answers(seen)
    end = "prefill_end" if seen.of("P", "prefill_end") and not answers else "computed"
    loads = seen.lasting(Phase.EP, "P", "feature_loaded")
    yield from between(Phase.HTTP_P, seen.last("proxy", "dispatched"), seen.first("P", "received"), seen.where("P"))
    yield from _front_end(seen, "P", Phase.PREPROCESS_P, Phase.PREFILL_QUEUE)
    yield from _without(seen.calls(Phase.PREFILL, "P", "scheduled", end), loads)
    if answers:
        yield from seen.calls(Phase.ANSWER_P, "P", "computed", "answering")
        yield from between(
            Phase.HTTP_P, seen.first("P", "answering"), seen.last("proxy", "first_byte"), seen.where("P")
        )


def _decode(seen: _Seen) -> Iterator[Span]:
    yield from seen.lasting(Phase.PD, "P", "kv_packet")
    yield from between(Phase.PD, seen.last("P", "prefill_end"), seen.last("D", "kv_done"), seen.where("D"))
    called = seen.last("proxy", "decode_sent") or seen.last("proxy", "dispatched")
    yield from between(Phase.HTTP_D, called, seen.first("D", "received"), seen.where("D"))
    yield from _front_end(seen, "D", Phase.PREPROCESS_D, Phase.DECODE_QUEUE)
    yield from seen.calls(Phase.DECODE_QUEUE, "D", ENTERED, "decode_reserved")
    yield from seen.calls(Phase.DECODE_QUEUE, "D", "kv_done", "scheduled")
    yield from seen.calls(Phase.FIRST_TOKEN, "D", "scheduled", "computed")
    yield from seen.calls(Phase.ANSWER_D, "D", "computed", "answering")
    yield from between(Phase.HTTP_D, seen.first("D", "answering"), seen.last("proxy", "first_byte"), seen.where("D"))
