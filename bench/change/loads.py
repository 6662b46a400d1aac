"""The load on a deployment that changes, and what became of it: errors, cut streams, wrong answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.clients.answers import CUT, ERROR_EVENT
from bench.clients.results import Outcome, RequestRecord
from bench.clients.sender import Flow, ask
from bench.clients.target import Request, Target
from bench.workloads.requests import Poisson, arrivals_within
from bench.workloads.synthetic import demo_body, demo_image, image_body, text_body
from epd_serve.errors import EpdError

SIDE, ANSWER_TOKENS = 224, 12
LIMIT_S = 180.0
REPEATED, NEW = 6, 400
"""Images that are asked about over and over, and those that come round after minutes."""

DEMO_TEXTS = {
    "Hello": "Hello! Send me a picture of coloured shapes.",
    "Who are you?": "I am a tiny demo model. I can see coloured shapes.",
    "Thanks": "You are welcome!",
}

PROFILE = {
    "comment": "made up: requests that take a tenth of a second",
    "encode": {"setup_s": 0.01, "per_unit_s": 0.00002},
    "prefill": {"setup_s": 0.005, "per_unit_s": 0.00005},
    "kv": {"setup_s": 0.002, "per_unit_s": 1e-10},
    "decode_step_s": [[1, 0.005], [64, 0.01]],
    "jitter": 0.1,
    "feature_bytes_per_token": 256,
}


def demo_flows(model: str, seconds: float) -> list[Flow]:
    """Text, repeated and new images, whole answers and streams, one of each kind at a time. `spec`: the answer that is
    right."""
    texts = [
        Request.of(
            {
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 24,
                "temperature": 0,
                "stream": stream,
            },
            spec=answer,
        )
        for question, answer in DEMO_TEXTS.items()
        for stream in (False, True)
    ]
    return [
        Flow(texts, "text", concurrency=1, duration_s=seconds),
        Flow(_images(model, range(REPEATED), stream=True), "repeated", concurrency=1, duration_s=seconds),
        Flow(_images(model, range(REPEATED, NEW), stream=False), "new", concurrency=1, duration_s=seconds),
    ]


def _images(model: str, seeds: Sequence[int], *, stream: bool) -> list[Request]:
    images = [demo_image(seed, SIDE) for seed in seeds]
    return [Request.of({**demo_body(model, image), "stream": stream}, spec=image.answer) for image in images]


def simulated_flows(model: str, seconds: float, per_s: float) -> list[Flow]:
    """Open loops: three requests of text for one with a new image. Every other one is a stream."""
    shares = {"text": 0.75 * per_s, "image": 0.25 * per_s}
    dues = {
        kind: arrivals_within(Poisson(rate), seconds, seed) for seed, (kind, rate) in enumerate(shares.items(), start=1)
    }
    texts = [text_body(model, tokens=64, answer=ANSWER_TOKENS, stream=turn % 2 == 1, seed=turn) for turn in range(32)]
    images = [
        image_body(model, side=56, answer=ANSWER_TOKENS, stream=turn % 2 == 1, seed=turn)
        for turn in range(len(dues["image"]))
    ]
    return [
        Flow([Request.of(body) for body in bodies], kind, dues=dues[kind])
        for kind, bodies in (("text", texts), ("image", images))
    ]


@dataclass
class Judged:
    """Attributes:
    errors: requests that had no whole answer, less the cut ones. cut: answers that had begun.
    wrong: whole answers that say something else than what is right.
    """

    requests: int = 0
    errors: list[RequestRecord] = field(default_factory=list)
    cut: list[RequestRecord] = field(default_factory=list)
    wrong: list[RequestRecord] = field(default_factory=list)

    def rows(self, part: str, begun_s: float) -> list[dict[str, Any]]:
        """How many of each kind, and each one that is none of the good."""
        counts = {name: len(getattr(self, name)) for name in ("errors", "cut", "wrong")}
        rows: list[dict[str, Any]] = [{"part": part, "requests": self.requests, **counts}]
        for name in counts:
            rows += [
                {
                    "part": part,
                    "bad": name,
                    "kind": one.kind,
                    "due": round(one.due_s - begun_s, 3),
                    "took": round(one.e2e_s, 3),
                    "fault": one.fault,
                    "error": one.error,
                    **({"text": one.text, "right": one.spec} if name == "wrong" else {}),
                }
                for one in getattr(self, name)
            ]
        return rows


def at_rest(target: Target | str, flows: Sequence[Flow]) -> Callable[[RequestRecord], str]:
    """Returns what asks for a request of these flows again, and returns the answer; "" where there is none."""
    asked = {flow.kind: flow for flow in flows}

    def again(record: RequestRecord) -> str:
        with contextlib.suppress(EpdError):
            return ask(target, json.loads(bytes(asked[record.kind].request(record.n).body)), LIMIT_S).text
        return ""

    return again


def judged(
    records: Sequence[RequestRecord],
    *,
    excused: Callable[[RequestRecord], bool] = lambda record: False,
    at_rest: Callable[[RequestRecord], str] = lambda record: "",
) -> Judged:
    """What became of requests.

    Args:
        excused: whether a request that came to nothing may have.
        at_rest: as the function of that name returns it: the model makes mistakes of its own.
    """
    sent = [one for one in records if one.outcome is not Outcome.CANCELLED]
    found = Judged(len(sent))
    for one in sent:
        if one.ok:
            if one.spec and one.text != one.spec and one.text != at_rest(one):
                found.wrong.append(one)
        elif excused(one):
            continue
        elif one.first_byte_s is not None and one.fault in (CUT, ERROR_EVENT):
            found.cut.append(one)
        else:
            found.errors.append(one)
    return found
