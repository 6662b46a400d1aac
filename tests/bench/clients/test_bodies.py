"""Requests of a run: from a workload, which makes new ones for every run, or from a file; ready before the run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.clients.bodies import (
    CLOSED_LOOP_REQUESTS,
    Source,
    chat_body,
    file_requests,
    file_source,
    spec_requests,
    workload_source,
)
from bench.clients.measure import Plan
from bench.clients.target import Request
from bench.workloads.requests import ClosedLoop, ImageRef, Poisson, RequestSpec
from epd_serve.errors import ConfigError

IMAGE = ImageRef(8, 8, 1)


def spec(n: int = 0, *images: ImageRef) -> RequestSpec:
    return RequestSpec(f"w-{n}", "what?", images, 64, 1)


def test_a_request_is_a_streamed_chat_of_exact_length_with_its_images_first():
    body = chat_body(spec(0, IMAGE), "m", lambda ref: "data:image/png;base64,x")
    image, text = body["messages"][0]["content"]

    assert image["image_url"]["url"] == "data:image/png;base64,x"
    assert text == {"type": "text", "text": "what?"}
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("m", 64, True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["return_token_ids"] is True, "an event for each token, also for those that are no text"


def test_an_unreadable_image_is_an_error_before_the_run():
    def unreadable(ref: ImageRef) -> str:
        raise ConfigError("image 7.png cannot be read")

    with pytest.raises(ConfigError, match=r"7\.png"):
        spec_requests([spec(0, IMAGE)], "m", unreadable)


def test_bodies_lie_ready_and_say_how_long_their_answers_have_to_be():
    given = [("a", {"x": "é"}), ("b", {"max_tokens": 5, "ignore_eos": True}), ("c", {"max_tokens": 5})]
    asks = [Request.of(body, name) for name, body in given]

    assert [json.loads(bytes(ask.body)) for ask in asks] == [body for _, body in given]
    assert [(ask.spec, ask.expected_tokens) for ask in asks] == [("a", None), ("b", 5), ("c", None)]


def test_bodies_of_a_file_are_sent_as_they_are_but_streamed(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "top_k": 3}\n\n{"model": "own"}\n')

    requests = file_requests(tmp_path / "b.jsonl", "m")
    one, other = (json.loads(bytes(request.body)) for request in requests)
    assert [request.spec for request in requests] == ["b.jsonl:1", "b.jsonl:3"]
    assert (one["prompt"], one["top_k"], one["model"], one["stream"]) == ("a", 3, "m", True)
    assert other["model"] == "own"


@pytest.mark.parametrize(
    ("text", "match"), [("", "no request"), ("{}\n[1]\n", "jsonl:2"), ("{\n", "jsonl:1 is no JSON object")]
)
def test_a_file_of_something_else_is_refused_with_its_line(tmp_path, text, match):
    (tmp_path / "b.jsonl").write_text(text)

    with pytest.raises(ConfigError, match=match):
        file_requests(tmp_path / "b.jsonl", None)
    with pytest.raises(ConfigError, match="cannot be read"):
        file_requests(tmp_path / "none.jsonl", None)


OPEN = Plan(Poisson(10.0), seconds=5.0)


def endless(seed: int) -> Iterator[RequestSpec]:
    return (RequestSpec(f"w-{seed}-{n}", "q", (), 4, 1) for n in itertools.count())


def workload(**more: bool) -> Source:
    return workload_source(endless, lambda ref: "", "m", 7, **more)


def names(source: Source, plan: Plan, number: int) -> list[str]:
    return [request.spec for request in source(plan, number).requests]


def test_a_workload_gives_as_many_requests_as_there_are_moments():
    requests = workload()(OPEN, 0)

    assert requests.dues == OPEN.dues()
    assert [request.spec for request in requests.requests] == [f"w-7-{n}" for n in range(len(OPEN.dues()))]


def test_the_next_run_has_other_requests_unless_the_same_are_wanted():
    assert names(workload(), OPEN, 1)[0] == "w-8-0"
    assert names(workload(repeats=True), OPEN, 1)[0] == "w-7-0"
    assert workload(repeats=True)(OPEN, 1).repeats
    assert not workload()(OPEN, 1).repeats


def test_a_count_ends_an_open_run_too():
    assert len(names(workload(), replace(OPEN, count=3), 0)) == 3
    assert len(replace(OPEN, count=3).dues()) == 3


def test_a_closed_loop_has_requests_without_moments():
    requests = workload()(Plan(ClosedLoop(2), seconds=1.0), 0)

    assert requests.dues is None
    assert len(requests.requests) == CLOSED_LOOP_REQUESTS


def test_a_file_says_when_its_bodies_are_sent_again():
    file = file_source([Request.of({}, "a")])

    assert file(OPEN, 0).repeats
    assert file(replace(OPEN, count=1), 1).repeats
    assert not file(replace(OPEN, count=1), 0).repeats
