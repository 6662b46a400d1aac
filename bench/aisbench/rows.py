"""From what AISBench recorded of requests to the rows of our own load generator, so that one set of definitions holds.

AISBench counts TTFT from sending, and everything it received is a token to it: it keeps the time of every chunk and of
none what was in it. So one small request is sent first, to know how many chunks come before the first content (a role
alone) and after the last (the usage); an endpoint that fails it would have failed minutes of load. Here a request is
due when the schedule said so, and an answer counts as
whole when it has as many tokens as were asked for, by the server's own count: an error event that is followed by
`[DONE]` is a success to AISBench, and has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from bench.aisbench.details import Sent
from bench.clients.answers import events, judge_reading, read_answer
from bench.clients.bodies import streamed
from bench.clients.results import Outcome, RequestRecord
from bench.clients.sender import Run
from bench.clients.target import CHAT, Target
from bench.workloads.requests import RequestSpec
from epd_serve.errors import StageError

TOKENS = 3
ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Chunks of an answer that are no tokens: `before` the first content and `after` the last."""

    before: int = 0
    after: int = 1


def shape_of(pieces: Iterable[tuple[float, bytes]]) -> Shape:
    """Of a whole answer with content."""
    bears = [bool(read_answer([(0.0, b"data: " + data + b"\n\n")]).content_s) for _, data in events(pieces)
             if data != b"[DONE]"]  # fmt: skip
    return Shape(bears.index(True), bears[::-1].index(True))


def look(target: Target, model: str) -> Shape:
    """Ask for a few tokens.

    Raises:
        StageError: nobody is there, or what comes is no answer to that.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    pieces = [(0.0, target.ask(CHAT, streamed(body), limit_s=ANSWER_S).content)]
    reading = read_answer(pieces)
    wrong = judge_reading(reading).error
    if not wrong and reading.completion_tokens is None:
        wrong = "the stream does not end with its usage, which AISBench counts tokens by"
    if wrong:
        where = str(target.endpoint)
        raise StageError(f"{where} does not answer a small request: {wrong}", stage=where)
    return shape_of(pieces)


_STATUS = {status.phrase: status.value for status in HTTPStatus}
_LOST = ("ClientConnectorError", "ServerDisconnectedError", "ClientOSError", "ConnectionResetError", "Cannot connect")


def run_of(label: str, sent: Sequence[Sent], specs: Sequence[RequestSpec], shape: Shape) -> Run:
    """The run of a rate: a row for each request of the workload that AISBench recorded, none for the warm-up's.

    Args:
        sent: by row of the export, of which 0 is the warm-up's.
        specs: the requests of the workload, in order, with arrivals.
    """
    by_row = {one.row: one for one in sent}
    counted = [(n, spec, by_row[n + 1]) for n, spec in enumerate(specs) if n + 1 in by_row]
    starts = [one.chunks_s[0] for _, _, one in counted if one.chunks_s]
    begun_s = min(starts, default=0.0)
    origins = (one.chunks_s[0] - (spec.arrival_s or 0.0) for _, spec, one in counted if one.chunks_s)
    origin_s = min(origins, default=begun_s)
    rows = [_row(label, n, spec, one, shape, origin_s + (spec.arrival_s or 0.0)) for n, spec, one in counted]
    run = Run(label, begun_s=min((row.due_s for row in rows), default=begun_s), rows=rows, sent=len(rows))
    run.issued_s = max((row.due_s for row in rows), default=begun_s)
    run.ended_s = max((row.ended_s for row in rows), default=begun_s)
    return run


def _row(label: str, n: int, spec: RequestSpec, one: Sent, shape: Shape, due_s: float) -> RequestRecord:
    """`due_s` stands for times that AISBench does not tell of a request that broke."""
    chunks = one.chunks_s
    sent_s = chunks[0] if chunks else None
    outcome, fault, error = _judged(one, spec.max_tokens)
    tokens = chunks[1 + shape.before : len(chunks) - shape.after]
    return RequestRecord(
        run=label,
        n=n,
        id=one.uuid or f"{label}-{n}",
        spec=spec.id,
        due_s=due_s,
        ready_s=due_s if sent_s is None else sent_s,
        sent_s=sent_s,
        token_s=tokens,
        last_s=tokens[-1] if tokens else None,
        ended_s=max(due_s, chunks[-1]) if chunks else due_s,
        outcome=outcome,
        status=_STATUS.get(error, 200 if len(chunks) > 1 else 0),
        usage_tokens=one.output_tokens or None,
        prompt_tokens=one.input_tokens or None,
        fault=fault,
        error=error,
    )


def _judged(one: Sent, asked: int) -> tuple[Outcome, str, str]:
    """(how it ended, what went wrong in a word, what was said)."""
    if not one.success:
        if one.error in _STATUS:
            return Outcome.ERROR, f"status {_STATUS[one.error]}", one.error
        if "cancelled by user" in one.error:
            return Outcome.CANCELLED, "", one.error
        if any(name in one.error for name in _LOST):
            return Outcome.ERROR, "unreachable", one.error
        if "ClientPayloadError" in one.error:
            return Outcome.TRUNCATED, "cut", one.error
        return Outcome.ERROR, "failed", one.error or "AISBench does not say what"
    if not one.chunks_s:
        return Outcome.ERROR, "no times", "AISBench was ended before it wrote the times of this request"
    if not one.output_tokens:
        return Outcome.ERROR, "no usage", "a success to AISBench, yet the server counted no token"
    if one.output_tokens < asked:
        return Outcome.TRUNCATED, "short", f"{one.output_tokens} tokens of {asked}"
    return Outcome.OK, "", ""
