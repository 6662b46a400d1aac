"""Bodies of requests: from a workload, from a file, ready before the run."""

from __future__ import annotations

import json
import tempfile

import pytest

from bench.client.bodies import chat_body, file_bodies, prepared, spec_bodies
from bench.workloads.spec import PictureRef, RequestSpec
from epd_serve.errors import ConfigError

PICTURE = PictureRef(8, 8, "png", seed=1)


def spec(n: int = 0, *pictures: PictureRef) -> RequestSpec:
    return RequestSpec(f"w-{n}", "what?", pictures, 64, 1)


def test_a_request_is_a_streamed_chat_of_exact_length_with_its_pictures_first():
    body = chat_body(spec(0, PICTURE), "m", lambda ref: "data:image/png;base64,x")
    picture, text = body["messages"][0]["content"]

    assert picture["image_url"]["url"] == "data:image/png;base64,x"
    assert text == {"type": "text", "text": "what?"}
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("m", 64, True, True)
    assert body["stream_options"] == {"include_usage": True}


def test_an_unreadable_picture_is_an_error_before_the_run():
    def unreadable(ref: PictureRef) -> str:
        raise ConfigError("picture 7.png cannot be read")

    with pytest.raises(ConfigError, match=r"7\.png"), prepared(spec_bodies([spec(0, PICTURE)], "m", unreadable)):
        pass


@pytest.mark.parametrize("held_bytes", [0, 20, 1000])
def test_bodies_lie_ready_in_memory_or_on_disk_and_say_how_long_their_answers_have_to_be(held_bytes):
    given = [("a", {"x": "é"}), ("b", {"max_tokens": 5, "ignore_eos": True}), ("c", {"max_tokens": 5})]
    with prepared(given, held_bytes) as asks:
        assert [json.loads(bytes(ask.body)) for ask in asks] == [body for _, body in given]
        assert [(ask.spec, ask.expected_tokens) for ask in asks] == [("a", None), ("b", 5), ("c", None)]


def test_a_disk_without_room_for_bodies_says_what_to_do(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "w+b", buffering=0))  # noqa: SIM115

    with pytest.raises(ConfigError, match=r"No space left on device; set TMPDIR"), prepared([("a", {})], 0):
        pass


def test_no_request_is_said():
    with pytest.raises(ConfigError, match="no request to send"), prepared([]):
        pass


def test_bodies_of_a_file_are_sent_as_they_are_but_streamed(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "top_k": 3}\n\n{"model": "own"}\n')

    (first, one), (second, other) = file_bodies(tmp_path / "b.jsonl", "m")
    assert (first, second) == ("b.jsonl:1", "b.jsonl:3")
    assert (one["prompt"], one["top_k"], one["model"], one["stream"]) == ("a", 3, "m", True)
    assert other["model"] == "own"


@pytest.mark.parametrize(
    ("text", "match"), [("", "no request"), ("{}\n[1]\n", "jsonl:2"), ("{\n", "jsonl:1 is no JSON")]
)
def test_a_file_of_something_else_is_refused_with_its_line(tmp_path, text, match):
    (tmp_path / "b.jsonl").write_text(text)

    with pytest.raises(ConfigError, match=match):
        file_bodies(tmp_path / "b.jsonl", None)
    with pytest.raises(ConfigError, match="cannot be read"):
        file_bodies(tmp_path / "none.jsonl", None)
