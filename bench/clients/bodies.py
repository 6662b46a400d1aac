"""The requests of a run, made before it: making them meanwhile would take the time that is measured.

They come from a file of bodies, or from a workload, which makes new ones for every run: a second rate with the images
of the first would be served from caches. Bodies lie in memory, since a sender that reads one from the disk is late by
the time that it takes: 100 requests of `multi-image-4k` take 1.5 GB.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.clients.measure import Plan
from bench.clients.target import Request
from bench.workloads.requests import ClosedLoop, ImageRef, RequestSpec, with_arrivals
from epd_serve.errors import ConfigError

CLOSED_LOOP_REQUESTS = 512
"""That a closed loop without a count is given; they repeat where it runs on."""

DataUrl = Callable[[ImageRef], str]
"""Of an image, as `image_url` takes it."""


def chat_body(spec: RequestSpec, model: str, data_url: DataUrl) -> dict[str, Any]:
    """The request as OpenAI's chat completions have it; the answer is streamed, counted, and of exactly that length. It
    has an event for each token, also for those that are no text, of which random weights give many."""
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(image)}} for image in spec.images
    ]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": spec.text}]}]
    asked = {"max_tokens": spec.max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return streamed({"model": model, "messages": messages, **asked})


def streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body, asking for a stream that ends with its usage."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def spec_requests(specs: Iterable[RequestSpec], model: str, data_url: DataUrl) -> list[Request]:
    """The requests of a workload, ready to be sent. Raises what `data_url` does of an image that it cannot read."""
    return [Request.of(chat_body(spec, model, data_url), spec.id) for spec in specs]


def file_requests(path: Path, model: str | None) -> list[Request]:
    """The requests of a file with one body per line, to be sent as they are, but streamed.

    Args:
        model: where a body names none.

    Raises:
        ConfigError: unreadable, empty, or a line that is no JSON object; with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--bodies {path} cannot be read: {error}", param="--bodies") from error
    requests: list[Request] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            raise ConfigError(
                f"{path}:{number} is no JSON object: one request body per line", param="--bodies"
            ) from None
        requests.append(Request.of(streamed({"model": model, **body} if model else body), f"{path.name}:{number}"))
    if not requests:
        raise ConfigError(f"--bodies {path} has no request", param="--bodies")
    return requests


@dataclass(frozen=True)
class Requests:
    """What one run sends. `dues`: seconds from its start; None in a closed loop. `repeats`: an earlier run had them."""

    requests: Sequence[Request]
    dues: Sequence[float] | None
    repeats: bool = False


Source = Callable[[Plan, int], Requests]
"""Makes the requests of one run after another: of a plan, and the number of the run."""


def file_source(requests: Sequence[Request]) -> Source:
    """The same requests for every run."""

    def of_run(plan: Plan, number: int) -> Requests:
        dues = None if isinstance(plan.arrivals, ClosedLoop) else plan.dues()
        return Requests(requests, dues, repeats=number > 0 or (dues is not None and len(dues) > len(requests)))

    return of_run


def workload_source(
    specs: Callable[[int], Iterable[RequestSpec]], data_url: DataUrl, model: str, seed: int, *, repeats: bool = False
) -> Source:
    """Those of a workload.

    Args:
        specs: its requests from a seed, in order.
        repeats: every run has the requests of the first.
    """

    def of_run(plan: Plan, number: int) -> Requests:
        sent = list(sent_by(with_arrivals(specs(seed if repeats else seed + number), plan.arrivals, plan.seed), plan))
        dues = [spec.arrival_s for spec in sent if spec.arrival_s is not None]
        return Requests(spec_requests(sent, model, data_url), dues or None, repeats=repeats and number > 0)

    return of_run


def sent_by(specs: Iterable[RequestSpec], plan: Plan) -> Iterator[RequestSpec]:
    """Those requests of a workload, with their arrivals, that the plan sends."""
    if isinstance(plan.arrivals, ClosedLoop):
        return itertools.islice(specs, plan.count or CLOSED_LOOP_REQUESTS)
    return itertools.takewhile(lambda spec: (spec.arrival_s or 0.0) < plan.until_s, itertools.islice(specs, plan.count))
