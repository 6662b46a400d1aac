"""What becomes of one request, noted while it runs: the one source of its `x-epd-*` headers, of its line in the access
log, and of what `epd-serve why` tells of it.

Always on, so noting is all that is done meanwhile: a tuple on a list, and candidates as they are at hand. What follows
from that is worked out when somebody asks. No content: names, counts, times, codes, and messages of ours.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from epd_serve.errors import EpdError, RequestError
from proxy.routing.plan import Plan
from proxy.routing.policy import Candidate, predictions_s

MAX_EVENTS, MAX_CHOICES = 200, 24
"""Of one request, which may be retried for minutes."""

MAX_MOMENTS, MAX_PREDICTIONS, MAX_VALUE_CHARS = 64, 8, 2000
"""Of headers: more than that some clients refuse."""

MAX_MESSAGE_CHARS, MAX_CODE_CHARS = 300, 64

MOMENTS = frozenset({
    "received", "media", "encoded", "admitted", "dispatched", "prefilled", "first_byte", "answered"
})  # fmt: skip
"""Events that `x-epd-timing-ms` tells; the others are in what `why` tells only."""

Event = tuple[float, str, dict[str, Any]]
"""Seconds since the arrival, a name, and details. `s` among them: for how long that has taken until then."""


class TraceContext(Struct, frozen=True):
    """Where a request belongs in a distributed trace: W3C Trace Context, from its headers and for those of its calls.

    Attributes:
        trace_id: 32 hex digits. span_id: 16, of the request's own span.
        parent_id: of its client's span, or "" where the trace begins here.
        sampled: the trace is wanted, as the client says; one that begins here is.
        state: `tracestate`, which is passed on as it came.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = True
    state: str = ""

    @classmethod
    def of(cls, traceparent: str, tracestate: str = "") -> TraceContext:
        """From a client's headers; what is malformed counts as not there."""
        from opentelemetry import trace  # only where there is a collector
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {"traceparent": traceparent.strip(), "tracestate": tracestate}
        parent = trace.get_current_span(TraceContextTextMapPropagator().extract(headers)).get_span_context()
        if not parent.is_valid:
            return cls(secrets.token_hex(16), new_span_id())
        ids = trace.format_trace_id(parent.trace_id), new_span_id(), trace.format_span_id(parent.span_id)
        return cls(*ids, parent.trace_flags.sampled, parent.trace_state.to_header())

    def headers(self, span_id: str) -> dict[str, str]:
        """Of a call whose span is this one, or "" where it has none of its own."""
        headers = {"traceparent": f"00-{self.trace_id}-{span_id or self.span_id}-{int(self.sampled):02x}"}
        return headers | {"tracestate": self.state} if self.state else headers


def new_span_id() -> str:
    """One that nobody else has; all zeros would mean none."""
    return secrets.token_hex(8).replace("0" * 16, "0" * 15 + "1")


class Choice(Struct, frozen=True, array_like=True):
    """What one choice of instances went by.

    Attributes:
        at_s: since the request's arrival.
        work: `prompt` (who takes it first), `decode` (who goes on with it), or `encode`.
        policy: which chose. cost: what the work adds, in the candidates' unit.
        candidates: who was there. paths: for each the way that the request would take, of a prompt.
        ranks: for each what spoke against it before any load, of a prompt; only those with the lowest were compared.
        chosen: ids. plan: number of the plan that it is part of. because: why that one was made.
        skipped: why it has no encoder asked, of a prompt.
    """

    at_s: float
    work: str
    policy: str
    cost: float
    candidates: Sequence[Candidate]
    chosen: Sequence[str]
    paths: Sequence[str] = ()
    ranks: Sequence[tuple[int, ...]] = ()
    plan: int = 0
    because: str = ""
    skipped: str = ""

    @property
    def compared(self) -> list[Candidate]:
        """Those among which the policy chose."""
        if not self.ranks:
            return list(self.candidates)
        best = min(self.ranks)
        return [one for one, rank in zip(self.candidates, self.ranks, strict=True) if rank == best]

    def predicted_s(self) -> dict[str, float]:
        """By id of those compared: when the work would be done there, and by how much that delays its neighbours."""
        compared = self.compared
        return {one.id: s for one, s in zip(compared, predictions_s(compared, self.cost), strict=True)}


class Record(Struct, array_like=True):
    """One request. Written by the task that serves it; packed as it is when it has ended, without the names of fields.

    Attributes:
        id: by which the stages and logs know it. client_id: its client's own name for it, or "".
        began: seconds since the epoch. clock: `time.monotonic` at that moment.
        tenant: digest, never the key. media: items by modality. answers: to one prompt.
        kind: `text` or `media`, of a request that asks stages for something; "" before that is known.
        path, encode, prefill, decode: of the last attempt, and instances that have encoded something for it.
        attempts: at prefill and decode. outcome: as in `epd_proxy_requests_total`, "" while it runs.
        status: of HTTP, 0 where none was sent. code, param, message: of the error, if it ended in one.
        finish: the model's reason. Token counts are None where no stage has said them.
        events_sent: of a stream. first_byte_s: of a stream, since the arrival.
        gaps: between events of a stream with content. gaps_within: those of them within `gap_limit_s`.
        ttft_limit_s: its own objective for the first token, where its objectives are not the deployment's; else 0.
        phases_s: how long each of `PHASES` took, in all of the request's life; they overlap.
        retried: something of it was done again. migrations: how often its stream went on at another instance.
        events, choices: in order; lost: how many found no place.
        failures: instance and code of each call that failed, also where another one helped.
        trace: where it belongs in a distributed trace, where such are made.
    """

    id: str
    endpoint: str = ""
    client_id: str = ""
    began: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.monotonic)
    tenant: str = ""
    model: str = ""
    stream: bool = False
    answers: int = 1
    media: dict[str, int] = {}
    kind: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    path: str = ""
    encode: list[str] = []
    prefill: str = ""
    decode: str = ""
    attempts: int = 0
    outcome: str = ""
    status: int = 0
    code: str = ""
    param: str = ""
    message: str = ""
    finish: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    events_sent: int = 0
    gaps: int = 0
    gaps_within: int = 0
    gap_limit_s: float = 0.0
    ttft_limit_s: float = 0.0
    first_byte_s: float | None = None
    total_s: float = 0.0
    phases_s: dict[str, float] = {}
    events: list[Event] = []
    choices: list[Choice] = []
    retried: bool = False
    migrations: int = 0
    lost: int = 0
    failures: list[tuple[str, str]] = []
    trace: TraceContext | None = None

    # While it runs.

    def note(self, event: str, **details: Any) -> None:
        """`event` has happened now. A name may come again when a step is repeated."""
        self._add(time.monotonic(), event, details)

    def _add(self, now: float, event: str, details: dict[str, Any]) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append((now - self.clock, event, details))
        else:
            self.lost += 1

    def again(self, event: str, **details: Any) -> None:
        """The same of a step that is done once more."""
        self.retried = True
        self.note(event, **details)

    def took(self, event: str, since: float, *, span: str = "", **details: Any) -> float:
        """`event` has come to its end now, and began at this moment of `time.monotonic`. Returns the seconds between.
        `span`: of a call."""
        if span:
            details["span"] = span
        now = time.monotonic()
        took_s = details["s"] = now - since
        if event in PHASES:
            phase = PHASES[event]
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + took_s
        self._add(now, event, details)
        return took_s

    def call_span(self) -> str:
        """An id for the span of a call of a stage that begins; "" where the trace is not wanted, or there is none."""
        return new_span_id() if self.trace is not None and self.trace.sampled else ""

    def planned(self, plan: Plan) -> None:
        """An attempt is to go by this plan."""
        number = max([choice.plan for choice in self.choices], default=0) + 1
        for work, pick in (("prompt", plan.head), ("decode", plan.tail)):
            if pick is not None:
                self._chose(
                    Choice(
                        time.monotonic() - self.clock,
                        work,
                        pick.policy,
                        pick.cost,
                        pick.seen,
                        [pick.chosen.id],
                        pick.paths,
                        pick.ranks,
                        number,
                        _text(plan.because, MAX_MESSAGE_CHARS),
                        plan.skipped if work == "prompt" else "",
                    )
                )

    def spread(self, cost: float, encoders: Sequence[Candidate], chosen: Sequence[str]) -> None:
        """Items of about this cost were spread over some of these."""
        self._chose(Choice(time.monotonic() - self.clock, "encode", "earliest", cost, encoders, chosen))

    def _chose(self, choice: Choice) -> None:
        if len(self.choices) < MAX_CHOICES:
            self.choices.append(choice)
        else:
            self.lost += 1

    def failed(self, event: str, error: EpdError, stage: str, **details: Any) -> None:
        """A call to `stage` has failed of this. What a stage refuses it may quote: that stays out."""
        code = _text(error.code or type(error).__name__, MAX_CODE_CHARS)
        if len(self.failures) < MAX_EVENTS:
            self.failures.append((stage, code))
        self.note(event, stage=stage, code=code, message=_message(error), **details)

    def ends_in(self, error: EpdError) -> None:
        """The client is answered with this."""
        self.code = _text(error.code or error.type, MAX_CODE_CHARS)
        self.param, self.message = _text(error.param or "", MAX_CODE_CHARS), _message(error)
        self.note("ends", status=error.status, code=self.code)

    def encoded_by(self, instance: str) -> None:
        """`instance` has encoded an item of the request."""
        if instance not in self.encode:
            self.encode.append(instance)

    def attempted(self, path: str, prefill: str, decode: str, transfer: str = "") -> None:
        """An attempt begins on these instances, with this transfer of KV between them."""
        self.attempts += 1
        self.path, self.prefill, self.decode = path, prefill, decode
        self.note("dispatched", path=path, prefill=prefill, decode=decode, transfer=transfer)

    def went_on(self, stage: str, *, way: str, tokens: int, gap_s: float) -> None:
        """The client's stream goes on, from this instance, `gap_s` after its last event and so many tokens."""
        self.migrations += 1
        self.again("went_on", stage=stage, way=way, tokens=tokens, gap_s=gap_s)

    def first_byte(self, stage: str) -> None:
        """The client's first token has come, from this instance."""
        self.note("first_byte", stage=stage)
        self.first_byte_s = self.events[-1][0]

    # What follows from it.

    @property
    def modality(self) -> str:
        """`text`, or what it has items of: `image`, `image+video`."""
        return "+".join(sorted(self.media)) if self.media else "text"

    @property
    def tokens_sent(self) -> int | None:
        """Of the answer: as the stage says, else the events of its stream that are tokens; None where neither is."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        around = 2 if self.endpoint.endswith("/chat/completions") else 1  # the role, and [DONE]
        return self.events_sent - around if self.events_sent > around else None

    def token_s(self, tokens: int | None) -> float | None:
        """Seconds per token after the first, of a stream of one answer with so many tokens (TPOT)."""
        if self.first_byte_s is None or tokens is None or tokens < 2 or self.answers > 1 or self.outcome != "200":
            return None
        return (self.total_s - self.first_byte_s) / (tokens - 1)

    def headers(self) -> dict[str, str]:
        """The `x-epd-*` response headers so far. `x-epd-timing-ms` counts from the arrival."""
        headers: dict[str, object] = {"request-id": self.id}
        if predicted := self._predicted_ms():
            headers["predicted-ms"] = predicted
        if self.attempts:
            stages = ("encode", "+".join(self.encode)), ("prefill", self.prefill), ("decode", self.decode)
            headers |= {"attempts": self.attempts, "path": self.path}
            headers["instances"] = ", ".join(f"{stage}={instance}" for stage, instance in stages if instance)
        moments = [f"{name}={1000 * at_s:.1f}" for at_s, name, _ in self.events if name in MOMENTS]
        headers["timing-ms"] = ", ".join(moments[:MAX_MOMENTS])
        return {f"x-epd-{name}": _printable(str(value)) for name, value in headers.items()}

    def _predicted_ms(self) -> str:
        """Of the last choice of each kind, of a head where there was one: the shortest times."""
        told = {"encode": 1, "prompt": 2}
        last = {one.work: one for one in self.choices if len(one.candidates) >= told.get(one.work, math.inf)}
        parts = []
        for work in sorted(last):
            shortest = sorted(last[work].predicted_s().items(), key=lambda pair: pair[1])[:MAX_PREDICTIONS]
            parts += [f"{work}@{name}={1000 * s:.1f}" for name, s in shortest]
        return ", ".join(parts)

    def phases_ms(self) -> Mapping[str, float]:
        """How long each phase took, for people, with the times of the first byte and of all."""
        phases = {**self.phases_s, "first_byte": self.first_byte_s, "total": self.total_s}
        return {name: round(1000 * s, 1) for name, s in phases.items() if s is not None}


PHASES = {
    "received": "body",
    "media": "media",
    "queued": "queue",
    "encoded": "encode",
    "prefilled": "prefill",
}
"""Events that took time, and what the access log calls that."""

CALLS = {"encode_call": "encode call", "prefilled": "prefill call", "answered": "answer call"}
"""Those that are calls of a stage, which they name, and what traces call them."""

SPAN_NAMES = {
    **PHASES,
    **CALLS,
    "downloaded": "download",
    "failed": "failed attempt",
    "apart": "wait apart from others",
    "waited": "wait for an instance",
}
"""What traces call everything that took time."""


def _message(error: EpdError) -> str:
    """Only where it is about us: of what is wrong with a request it may quote the request."""
    return "" if isinstance(error, RequestError) else _text(error.message, MAX_MESSAGE_CHARS)


def _text(text: str, most: int) -> str:
    """Not longer than that, and of characters that can be encoded: JSON lets half of one through."""
    text = text[:most]
    return text if text.isascii() else text.encode(errors="replace").decode()


def _printable(value: str) -> str:
    """Header-safe: names of instances come from other hosts too."""
    return "".join(char if " " <= char <= "~" else "?" for char in value[:MAX_VALUE_CHARS])
