"""A body that kills whatever stage works on it, sent to a layout of simulated stages under the launcher."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_serve.endpoint import unix_url
from tests.deploy.front.test_sim_front_doors import command_line, launch_id, members
from tests.deploy.launch.test_sim_launch import launched
from tests.deploy.launched import fetch
from tests.deploy.sim_load import CHAT, TEXT, in_flight
from tests.stage_http import make_faulty
from tests.waiting import PATIENCE_S, wait_for

POISON = "drink-me"
INNOCENTS = 30


def stage_urls(folder: Path, role: str) -> list[str]:
    lines = [command_line(pid).decode().split("\0") for pid in members(launch_id(folder))]
    stages = [line for line in lines if any(f'"role": "{role}"' in word for word in line)]
    return [unix_url(line[line.index("--uds") + 1]) for line in stages]


def poisoned(**faults: Any) -> dict[str, Any]:
    return {"poison": POISON, **faults}


def saying(text: str) -> dict[str, Any]:
    return {**TEXT, "messages": [{"role": "user", "content": text}], "max_tokens": 500}


def lives(url: str) -> dict[str, str]:
    found = json.loads(fetch(f"{url}/instances")[1])["instances"]
    return {one["id"]: one["incarnation"] for one in found}


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        return client.post(CHAT, json=body)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "role"), [("4PD", "PD"), ("3P-D", "P")])
def test_a_poisonous_body_is_refused_and_innocents_get_their_answers(tmp_path: Path, layout: str, role: str) -> None:
    # Of the command line, so that the next life of a stage has it, too.
    with launched(tmp_path, layout, "--stage-args", f"{role}:--fault poison={POISON}") as (client, launcher):
        url = str(client.base_url)
        before = lives(url)
        stages = stage_urls(tmp_path, role)
        assert len(stages) >= 3
        for stage in stages:
            make_faulty(stage, slow=3)
        for stage in stage_urls(tmp_path, "D"):
            make_faulty(stage, slow=3)
        with ThreadPoolExecutor(INNOCENTS + 1) as pool:
            innocents = [pool.submit(post, url, saying(f"hello {number}")) for number in range(INNOCENTS)]
            wait_for(lambda: sum(in_flight(url).values()) >= 10, "innocents to be under way")
            first = post(url, saying(POISON))
            assert first.status_code == 422 and first.json()["error"]["code"] == "poisonous_request", first.text
            answers = [one.result() for one in innocents]
        assert [one.status_code for one in answers] == [200] * INNOCENTS, [one.text for one in answers][:3]
        wait_for(lambda: fetch(f"{url}/ready?all")[0] == 200, "all stages to be restarted")
        after = lives(url)
        assert 2 <= sum(after[name] != before[name] for name in before) <= 4
        for _ in range(3):
            assert post(url, saying(POISON)).status_code == 422
        assert lives(url) == after and launcher.poll() is None
        assert post(url, saying("hello again")).status_code == 200


@pytest.mark.slow
def test_a_stage_that_dies_again_and_again_is_never_given_up(tmp_path: Path) -> None:
    """One stage, so that the same one dies each time, while clients insist."""
    with launched(tmp_path, "PD", "--proxy", "poison.quarantine_s=0.1", "--proxy", "poison.quarantine_max_s=0.1") as (
        client,
        launcher,
    ):
        url = str(client.base_url)
        for number in range(4):
            (stage,) = stage_urls(tmp_path, "PD")
            before = lives(url)["PD0"]
            make_faulty(stage, **poisoned())
            answer = post(url, saying(f"{POISON} {number}"))
            assert answer.status_code == 200, "tried once more, with a next life that has not been poisoned"
            assert lives(url)["PD0"] != before and launcher.poll() is None
        assert post(url, saying("hello")).status_code == 200
