"""Where a request is inside a stage: stamps of its API server and its scheduler, under the proxy's name of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from epd_serve.engine import request_trace
from epd_serve.engine.argv import WIRING_ENV
from epd_serve.engine.request_trace import HANDED_OVER, HANDING_OVER, REQUEST_LOG, RequestTrace, SchedulerTrace
from epd_serve.roles import Role
from epd_serve.trace import Trace
from epd_serve.wiring import StageWiring


class MediaConnector:
    """Loads media, as vLLM's does."""

    async def load_from_url_async(self, url: str) -> str:
        return url.upper()


class Connectors(dict[str, Any]):
    def register(self, name: str) -> Any:
        return lambda connector: self.setdefault(name, connector)


@pytest.fixture
def connectors(monkeypatch: pytest.MonkeyPatch) -> Connectors:
    found = Connectors()
    monkeypatch.setattr(request_trace, "media_connectors", lambda: (found, MediaConnector))
    monkeypatch.setenv(request_trace.CONNECTOR_ENV, "")
    monkeypatch.delenv(request_trace.CONNECTOR_ENV)
    return found


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connectors: Connectors) -> Iterator[FastAPI]:
    wiring = StageWiring("P0", Role.P, "life", trace_path=str(tmp_path / "P0.jsonl"))
    monkeypatch.setenv(WIRING_ENV, json.dumps(wiring.to_json()))
    app = FastAPI()
    app.add_middleware(RequestTrace)

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> StreamingResponse:
        await request.json()
        await connectors[request_trace.CONNECTOR]().load_from_url_async("data:")
        logging.getLogger(HANDING_OVER).warning(HANDED_OVER, "chatcmpl-r1-0123abcd")
        return StreamingResponse(iter([b"data: 1\n\n", b"data: [DONE]\n\n"]))

    yield app
    logging.getLogger(HANDING_OVER).filters.clear()
    logging.getLogger(REQUEST_LOG).setLevel(logging.NOTSET)


def stamps(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def post(app: FastAPI, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://stage") as client:
        return await client.post("/v1/chat/completions", json={"messages": []}, headers=headers)


async def test_a_request_is_stamped_from_its_arrival_to_its_answer(
    stage: FastAPI, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await post(stage, **{"x-request-id": "r1"})).status_code == 200

    found = stamps(tmp_path / "P0.jsonl")
    assert [(one["subject"], one["event"]) for one in found] == [
        ("r1", event) for event in ("received", "decoded", "handed_over", "answering")
    ]
    assert [one["t"] for one in found] == sorted(one["t"] for one in found)
    assert found[0]["t"] <= found[1]["t0"] <= found[1]["t"]
    assert not [record for record in caplog.records if record.name == HANDING_OVER], "the line is for the trace alone"


async def test_a_request_without_a_name_leaves_no_stamp_of_the_server(stage: FastAPI, tmp_path: Path) -> None:
    await post(stage)

    assert {one["event"] for one in stamps(tmp_path / "P0.jsonl")} == {"handed_over"}  # by the name that vLLM has


async def test_other_lines_of_the_log_pass(stage: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    await post(stage, **{"x-request-id": "r1"})

    logging.getLogger(HANDING_OVER).warning("Request %s aborted.", "r1")

    assert [record.getMessage() for record in caplog.records if record.name == HANDING_OVER] == ["Request r1 aborted."]


def test_an_operators_own_media_connector_stays(
    tmp_path: Path, connectors: Connectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(request_trace.CONNECTOR_ENV, "theirs")

    request_trace.trace_media_decoding(Trace("", "P0"))

    assert not connectors


def outputs(*requests: str) -> list[Any]:
    return [SimpleNamespace(outputs=[SimpleNamespace(request_id=request) for request in requests])]


def scheduled(*requests: str, finished: tuple[str, ...] = ()) -> Any:
    new = [SimpleNamespace(req_id=request) for request in requests]
    return SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=set(finished))


def test_the_scheduler_stamps_arrival_first_step_and_first_token_once(tmp_path: Path) -> None:
    trace = SchedulerTrace(Trace(str(tmp_path / "D0.jsonl"), "D0"))

    trace.queued(SimpleNamespace(request_id="chatcmpl-a-01234567"))
    trace.scheduled(scheduled("chatcmpl-a-01234567"))
    trace.updated(outputs())  # of a longer prompt than one step computes
    for _ in range(3):
        trace.scheduled(scheduled())
        trace.updated(outputs("chatcmpl-a-01234567"))

    found = [(one["subject"], one["event"]) for one in stamps(tmp_path / "D0.jsonl")]
    assert found == [("a", "queued"), ("a", "scheduled"), ("a", "computed")]


def test_a_request_that_ended_before_its_first_token_has_none(tmp_path: Path) -> None:
    trace = SchedulerTrace(Trace(str(tmp_path / "D0.jsonl"), "D0"))

    trace.scheduled(scheduled("a"))
    trace.scheduled(scheduled("b", finished=("a",)))
    trace.updated(outputs("a", "b"))

    assert [(one["subject"], one["event"]) for one in stamps(tmp_path / "D0.jsonl")][2:] == [("b", "computed")]
