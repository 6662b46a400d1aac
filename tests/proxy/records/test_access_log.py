"""The access log: one line a request, whatever becomes of the request, of the file, and of whoever reads it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epd_serve.errors import ConfigError
from proxy.records import lines as subject
from proxy.records.lines import AccessLog, LinesFile
from proxy.records.record import Record
from tests.proxy.fakes import (
    DONE,
    api_keys,
    chunk,
    cluster,
    encodes,
    hangs,
    image_body,
    opening,
    replies,
    settings,
    streams,
    text_body,
)
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ignored(_: int) -> None: ...


class opened(AccessLog):
    """With a file of its own."""

    def __init__(self, path: Path, dropped: Callable[[int], object] = ignored) -> None:
        super().__init__(LinesFile(str(path), "access_log", dropped))

    def close(self) -> None:
        self._file.close()


async def test_an_answer_s_line_says_all_there_is_to_say(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with cluster("E0", "P0", "D0", config=settings(access_log=str(path))) as c:
        c["E0"].usual = encodes()
        body = {"choices": [{"index": 0, "message": {"content": "secret"}, "finish_reason": "stop"}], "usage": USAGE}
        c["D0"].usual = replies(200, body)
        answer = await c.client.post(CHAT, json=image_body(), headers={"x-request-id": "mine"})
        sent = len((await c.client.post(CHAT, json=image_body())).request.content)
    line, _ = lines(path)
    assert line["client_id"] == "mine" and line["id"] == c["E0"].calls[0].headers["x-request-id"]
    assert (line["endpoint"], line["model"], line["stream"], line["tenant"]) == (CHAT, "demo", False, "default")
    assert (line["modality"], line["items"]) == ("image", {"image": 1})
    assert (line["path"], line["encode"], line["prefill"], line["decode"]) == ("E-P-D", ["E0"], "P0", "D0")
    assert (line["outcome"], line["status"], line["attempts"], line["finish"]) == ("200", 200, 1, "stop")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 2)
    assert (line["bytes_in"], line["bytes_out"]) == (sent, len(answer.content))
    assert line["ms"].keys() == {"body", "media", "encode", "prefill", "total"}
    assert all(0 <= ms <= line["ms"]["total"] for ms in line["ms"].values())
    assert line["time"].endswith("Z") and "secret" not in path.read_text()


async def test_a_stream_s_line_has_its_events_and_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    last = chunk("", finish_reason=None).replace(b'"index": 0', b'"index": 0, "finish_reason": "length"')
    async with cluster("PD0", config=settings(access_log=str(path))) as c:
        c["PD0"].usual = streams(opening(0), chunk("a"), chunk("b"), last, DONE)
        answer = await c.client.post(CHAT, json=text_body(stream=True))
    (line,) = lines(path)
    assert (line["events"], line["finish"], line["bytes_out"]) == (5, "length", len(answer.content))
    assert line["ms"]["first_byte"] <= line["ms"]["total"] and "prompt_tokens" not in line


async def test_refusals_retries_and_cut_answers_have_their_codes(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with cluster("PD0", "PD1", config=settings(access_log=str(path))) as c:
        await c.client.post(CHAT, content=b"{")
        c["PD0"].script.append(replies(500, {}))
        c["PD1"].script.append(replies(502, {}))
        await c.client.post(CHAT, json=text_body())
        for stage in ("PD0", "PD1"):
            c[stage].usual = streams(chunk("a"), then="break")
        await c.aborted_stream(text_body(stream=True))
        for stage in ("PD0", "PD1"):
            c[stage].usual = hangs
        leaving = asyncio.create_task(c.client.post(CHAT, json=text_body()))
        while not any(c[stage].active for stage in ("PD0", "PD1")):
            await asyncio.sleep(0.002)
        leaving.cancel()
        await c.idle()
    wrong, retried, cut, left = lines(path)
    assert (wrong["status"], wrong["code"]) == (400, "invalid_json")
    assert retried["attempts"] == 3 and {one["stage"] for one in retried["failures"]} == {"PD0", "PD1"}
    assert {one["code"] for one in retried["failures"]} == {"stage_failed"}
    assert (cut["outcome"], cut["status"]) == ("broken", 200) and cut["code"]
    assert left["outcome"] == "cancelled" and "status" not in left


async def test_a_key_is_never_written_but_whose_request_it_was(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    config = settings(access_log=str(path), api_keys=api_keys("key-a", "key-b", requests_per_minute=1))
    async with cluster("PD0", config=config) as c:
        for key in ("key-a", "key-a", "key-b", "wrong"):
            await c.client.post(CHAT, json=text_body(), headers={"authorization": f"Bearer {key}"})
    first, again, other, nobody = lines(path)
    assert first["tenant"] == again["tenant"] != other["tenant"] and "tenant" not in nobody
    assert (again["status"], again["code"]) == (429, "rate_limit_exceeded") and nobody["status"] == 401
    assert not any(secret in path.read_text() for secret in ("key-a", "key-b", "wrong"))


def test_a_file_that_was_taken_away_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old = tmp_path / "access.jsonl", tmp_path / "access.jsonl.1"
    log = opened(path)
    log.ended(Record("first"))
    wait_for(lambda: path.read_text().count("\n") == 1, "the first line")
    path.rename(old)
    log.ended(Record("second"))
    wait_for(lambda: path.exists() and path.read_text().count("\n") == 1, "the second line")
    log.close()
    assert [one["id"] for one in lines(old)] == ["first"] and [one["id"] for one in lines(path)] == ["second"]


def test_processes_that_share_a_file_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    several = [opened(path) for _ in range(3)]
    for number in range(300):
        several[number % 3].ended(Record(str(number)))
    for one in several:
        one.close()
    assert sorted(int(one["id"]) for one in lines(path)) == list(range(300))


def test_a_reader_that_does_not_read_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subject, "HELD_BYTES", 10_000)
    monkeypatch.setattr(subject, "LAST_S", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    lost: list[int] = []
    log = opened(pipe, lost.append)
    for number in range(2000):
        log.ended(Record(str(number)))
    log.close()
    assert sum(lost) > 1000
    os.close(reader)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no/such/folder") as refused:
        opened(tmp_path / "no/such/folder")
    assert refused.value.param == "access_log"
