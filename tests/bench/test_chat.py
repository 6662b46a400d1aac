"""The measuring client: pictures that are unique, first content that is not the role chunk, failures that are loud."""

from __future__ import annotations

import base64
import io
import json

import httpx
import pytest
from PIL import Image

from bench.chat import ask, body, picture
from epd_serve.errors import StageError


def stream(*events: object) -> bytes:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def delta(**fields: object) -> dict[str, object]:
    return {"choices": [{"delta": fields}]}


def client_answering(status: int, content: bytes) -> httpx.Client:
    answer = httpx.Response(status, content=content, headers={"x-request-id": "r1"})
    return httpx.Client(transport=httpx.MockTransport(lambda _: answer))


def test_no_two_pictures_are_the_same():
    assert len({picture(seed, 64).url for seed in range(200)}) == 200


def test_a_picture_has_the_size_asked_for():
    data = base64.b64decode(picture(3, 96).url.partition(",")[2])

    assert Image.open(io.BytesIO(data)).size == (96, 96)


def test_the_role_chunk_is_not_the_first_token():
    with client_answering(200, stream(delta(role="assistant", content=""), delta(content="a"), "[DONE]")) as client:
        answer = ask(client, "http://stage", body("m", picture(1, 64)))

    assert (answer.text, answer.request_id) == ("a", "r1")
    assert answer.sent <= answer.first_content <= answer.ended


@pytest.mark.parametrize(
    ("status", "content"),
    [(500, b"no"), (200, stream({"error": {"message": "dead"}})), (200, stream(delta(content=""), "[DONE]"))],
    ids=["status", "error event", "no content"],
)
def test_a_failed_request_is_no_figure(status, content):
    with client_answering(status, content) as client, pytest.raises(StageError):
        ask(client, "http://stage", body("m", picture(1, 64)))
