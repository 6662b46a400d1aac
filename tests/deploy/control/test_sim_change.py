"""A deployment of simulated stages is changed by its commands while clients ask: none of them notices."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.cli.command import main
from tests.deploy.launch.test_sim_launch import launched
from tests.deploy.sim_load import load, more
from tests.waiting import wait_for


class Commands:
    """`epd-serve WORDS…` on the one deployment below a folder."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capfd = capfd

    def __call__(self, *words: str, expected: int = 0) -> Any:
        """Returns what it prints as JSON."""
        self._capfd.readouterr()
        code = main([*words, "--json", "--run-root", str(self._folder)])
        said = self._capfd.readouterr().out
        assert code == expected, said
        return json.loads(said)

    def up(self) -> list[str]:
        status = self("status")
        return sorted(one["id"] for one in status["instances"] if one["phase"] == "up")


@pytest.mark.slow
def test_clients_do_not_notice_that_encoders_come_and_go(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = Commands(tmp_path, capfd)
    with launched(tmp_path, "(E-P)-D") as (client, _), load(str(client.base_url)) as found:
        more(found)
        assert commands("scale", "E=2")["change"]["state"] == "done"
        assert commands.up() == ["D0", "E0", "E1", "P0"]
        wait_for(lambda: _encoded(client).get("E1"), "the new encoder is used")
        assert commands("scale", "E=1")["change"]["cut_requests"] == 0
        more(found)
    assert found.errors == [] and found.broken == []


@pytest.mark.slow
def test_clients_do_not_notice_a_walk_through_layouts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = Commands(tmp_path, capfd)
    with launched(tmp_path, "EP-D") as (client, _), load(str(client.base_url)) as found:
        for layout in ("E-P-D", "(E-P)-D", "(E-PD)x2", "TP1x2", "EP-D"):
            more(found)
            told = commands("relayout", layout)
            assert told["change"]["state"] == "done" and told["change"]["cut_requests"] == 0, told
        more(found)
        assert commands("undo")["layout"] == "2EPD"
        more(found)
        assert commands("restart", "all")["change"]["state"] == "done"
        more(found)
    assert found.errors == [] and found.broken == []


@pytest.mark.slow
def test_new_requests_wait_in_a_pause_and_none_is_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A P and a D alone serve no request: what begins in between has to wait."""
    commands = Commands(tmp_path, capfd)
    with launched(tmp_path, "EP-D") as (client, _), load(str(client.base_url)) as found:
        more(found)
        commands("restart", "D0", "--pause", "30")
        more(found)
    assert found.errors == [] and found.broken == []


@pytest.mark.slow
def test_prefill_and_decode_become_each_other_without_a_restart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = Commands(tmp_path, capfd)
    with launched(tmp_path, "2P-2D", "--switchable") as (client, _), load(str(client.base_url)) as found:
        before = {one["incarnation"] for one in commands("status")["instances"]}
        for counts, steps in (
            ("P=1,D=3", ["leave", "flip"]),
            ("P=3,D=1", ["flip", "flip"]),
            ("P=2,D=2", ["leave", "flip"]),
        ):
            more(found)
            change = commands("scale", counts)["change"]
            assert [step["action"] for step in change["steps"]] == steps and change["state"] == "done", change
        more(found)
        assert {one["incarnation"] for one in commands("status")["instances"]} == before
    assert found.errors == [] and found.broken == []


@pytest.mark.slow
def test_a_killed_front_door_costs_its_connections_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = Commands(tmp_path, capfd)
    with launched(tmp_path, "E-P-D") as (client, launcher):
        before = commands("status")["instances"]
        front = commands("status")["parts"]["front.0"]["pid"]
        os.kill(front, signal.SIGKILL)
        wait_for(lambda: _answers(client), "another front door")
        after = commands("status")["instances"]
        assert [one["incarnation"] for one in after] == [one["incarnation"] for one in before]
        assert commands("status")["parts"]["front.0"]["pid"] != front and launcher.poll() is None


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def _encoded(client: httpx.Client) -> dict[str, int]:
    views = client.get("/instances").json()["instances"]
    return {view["id"]: view["store"]["counters"].get("encoded", 0) for view in views if view["store"] is not None}
