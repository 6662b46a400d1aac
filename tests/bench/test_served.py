"""What a measurement reads from the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.served import LOGS_ENV, parse_ready, served
from deploy.agent.cpu_time import groups
from deploy.launch.ready_message import ready_message
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from epd_serve.errors import StageError
from tests.deploy.wired import RUN, Wired


def test_the_ready_message_names_the_sockets_of_the_stages():
    blueprint = draw(DeployConfig(layout="(E-P)-D", device="cpu"))

    parsed = parse_ready(ready_message(blueprint, RUN.path, Wired(blueprint).instances(), 12.3))

    assert parsed is not None
    model, stages = parsed
    assert model == "epd-demo"
    assert {stage.instance: (stage.role, stage.server) for stage in stages} == {
        "E0": ("E", "E0.http"),
        "P0": ("P", "P0.http"),
        "D0": ("D", "D0.http"),
    }


def test_half_a_ready_message_is_not_ready():
    assert parse_ready("Ready in 3.0 s: TP1 on cpu serves epd-demo\n") is None


def test_logs_of_a_launch_outlive_it_where_a_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(LOGS_ENV, str(tmp_path / "logs"))

    with served("(E-P)-D", ("--engine", "sim"), traced=False):
        pass
    kept = tmp_path / "logs" / "(E-P)-D"
    assert {path.name for path in kept.iterdir()} >= {"launcher.log", "E0.log", "P0.log", "D0.log"}


def test_logs_of_a_launch_that_did_not_start_are_kept_too(tmp_path, monkeypatch):
    monkeypatch.setenv(LOGS_ENV, str(tmp_path / "logs"))

    with pytest.raises(StageError, match="did not become ready"), served("no layout", name="a wrong one"):
        pass
    assert "no layout" in (tmp_path / "logs" / "a_wrong_one" / "launcher.log").read_text()


def test_the_newest_process_of_an_instance_counts(tmp_path: Path) -> None:
    run = tmp_path / "launch"
    run.mkdir()
    lines = [{"instance": "P0", "pid": 1}, {"instance": "D0", "pid": 2}, {"instance": "P0", "pid": 3}]
    (run / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert groups(tmp_path) == {"P0": 3, "D0": 2}
