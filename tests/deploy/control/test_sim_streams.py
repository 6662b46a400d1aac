"""Streams on an instance that ends before they do, its time to drain being over: another one goes on with them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest

from tests.deploy.control.test_sim_change import Commands
from tests.deploy.launch.test_sim_launch import launched
from tests.deploy.sim_load import CHAT, TEXT
from tests.waiting import PATIENCE_S

STREAMS = 8
TOKENS, TOKEN_S = 500, 0.03  # for longer than an instance may go on, its drain and its end together


@pytest.mark.slow
def test_streams_that_a_drain_does_not_wait_for_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = Commands(tmp_path, capfd)
    profile = tmp_path / "slow.json"
    profile.write_text(json.dumps({"decode_step_s": [[1, TOKEN_S]]}))
    bodies = [_body(number, {"seed": number} if number % 2 else {}) for number in range(STREAMS)]
    with (
        launched(tmp_path, "2PD", "--drain-s", "1", "--sim-profile", str(profile)) as (client, _),
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        undisturbed = [_text(answer.json()) for answer in pool.map(lambda body: client.post(CHAT, json=body), bodies)]
        begun = Barrier(STREAMS + 1, timeout=PATIENCE_S)
        streams = [pool.submit(_stream, client, body, begun) for body in bodies]
        begun.wait()
        change = commands("scale", "PD=1")["change"]
        told = [one.result() for one in streams]
    assert [text for text, _ in told] == undisturbed
    assert 0 < sum(moves for _, moves in told) == change["cut_requests"], change


def _body(number: int, more: dict[str, Any]) -> dict[str, Any]:
    return {**TEXT, "messages": [{"role": "user", "content": f"hi {number}"}], "max_tokens": TOKENS, **more}


def _text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def _stream(client: httpx.Client, body: dict[str, Any], begun: Barrier) -> tuple[str, int]:
    """(its text, how often it moved). Once it has begun it waits for the others."""
    with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        got = [next(lines)]
        begun.wait()
        got += [line for line in lines if line]
    assert got[-1] == "data: [DONE]", got[-2:]
    said = [json.loads(line[6:]) for line in got if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in said)
    moves = [int(line.rpartition(" ")[2]) for line in got if line.startswith(": x-epd-migrations: ")]
    return text, sum(moves)
