"""The proxy alone, in front of stages from a file."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from deploy.cluster import alone
from deploy.cluster.alone import read_stages_file, run_proxy
from deploy.cluster.front import Front
from deploy.host.ports import free_ports
from epd_serve.errors import ConfigError, EpdError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from tests.waiting import PATIENCE_S, wait_for

REPOSITORY = Path(__file__).parents[3]
FAKE_STAGE = str(Path(__file__).parents[1] / "fake_stage.py")


def stages_file(folder: Path, text: str) -> str:
    path = folder / "stages.yaml"
    path.write_text(text)
    return str(path)


def test_a_stages_file_becomes_instances(tmp_path: Path) -> None:
    text = "model: m\nstages:\n  - {id: P0, role: P, url: 'http://h:1/', incarnation: a, kv_endpoint: 'ipc:///p', "
    text += "kv_news: ['ipc:///n0', 'ipc:///n1'], load_news: 'ipc:///l'}\n"
    file = read_stages_file(stages_file(tmp_path, text))
    (one,) = file.instances
    assert (one.id, one.role, one.url, one.incarnation) == ("P0", Role.P, "http://h:1", "a")
    assert one.kv_endpoint == "ipc:///p"
    assert (one.kv_news, one.kv_workers, one.load_news) == (("ipc:///n0", "ipc:///n1"), (), "ipc:///l")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: []", "model"),
        ("model: m\nstages: []", "at least one"),
        ("model: m\nstagess: []\nstages: [{id: a, role: P, url: 'http://h:1'}]", "did you mean 'stages'"),
        ("model: m\nstages: [{id: a, role: P}]", "id, role and url"),
        ("model: m\nstages: [{id: a, role: X, url: 'http://h:1'}]", "unknown role 'X'"),
        ("model: m\nstages: [{id: a, role: P, url: 'https://h:1'}]", "not http://HOST:PORT"),
        ("model: m\nstages: [{id: a, role: P, url: 'http://h:1', incarnaton: 3}]", "did you mean 'incarnation'"),
        ("model: m\nstages: [{id: a, role: P, url: 'http://h:1', kv_news: 'ipc:///n'}]", "is not a list of addresses"),
        ("model: m\nstages: [{id: a, role: P, url: 'http://h:1', load_news: 7}]", "load_news 7 is not an address"),
        ("{", "stages.yaml"),
    ],
)
def test_what_is_wrong_in_a_stages_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_stages_file(stages_file(tmp_path, text))
    assert message in str(refused.value)


def health(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_health(port: int, status: int) -> None:
    wait_for(lambda: health(port) == status)


def test_what_ends_the_front_door_is_one_named_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def fails(_: Front) -> None:
        raise EpdError("proxy worker 0 did not start: exit code 1")

    monkeypatch.setattr(Front, "serve", fails)
    stages = stages_file(tmp_path, "model: m\nstages: [{id: PD0, role: PD, url: 'http://127.0.0.1:1'}]\n")
    with pytest.raises(EpdError, match="did not start"):
        run_proxy(stages=stages, host="127.0.0.1", port=0, proxy=(), lame_duck_s=0.0, drain_s=0.0)


def models(port: int, key: str) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_proxy_alone_follows_its_stages_asks_for_keys_and_ends_on_sigterm(tmp_path: Path) -> None:
    port, stage_port = free_ports(2)
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    keys.chmod(0o600)
    text = f"model: m\nstages: [{{id: EPD0, role: EPD, url: 'http://127.0.0.1:{stage_port}'}}]\n"
    argv = [sys.executable, "-m", "deploy.cli", "proxy", "--stages", stages_file(tmp_path, text), "--port", str(port)]
    argv += ["--api-key-file", str(keys), "--lame-duck-s", "0"]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    proxy = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE)
    stage = None
    try:
        wait_health(port, 503)
        stage = subprocess.Popen([sys.executable, FAKE_STAGE, str(stage_port)], stdout=subprocess.DEVNULL)
        wait_health(port, 200)
        assert [models(port, key) for key in ("one", "two", "three")] == [200, 200, 401]
        stage.kill()
        wait_health(port, 503)
        proxy.send_signal(signal.SIGTERM)
        _, err = proxy.communicate(timeout=PATIENCE_S)
        assert proxy.returncode == 0, err
    finally:
        for process in filter(None, (proxy, stage)):
            process.kill()
            process.wait()


class Seen:
    """A status table that notes what it is told, and ends the watch when it was told enough."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def mark_up(self, _: str) -> None:
        self.told.append("up")

    def mark_down(self, _: str, why: str) -> None:
        self.told.append(why)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([200, TimeoutError, TimeoutError, TimeoutError, 200], ["up", "up"]),
        ([200, *[TimeoutError] * 4], ["up", "hung: no answer on /health, 4 times in a row"]),
        ([200, None], ["up", "/health answers nothing"]),
        ([200, 503, 200], ["up", "/health answers 503", "up"]),
    ],
    ids=["a busy stage", "one that hangs", "one that is gone", "one that is ill"],
)
async def test_a_stage_is_down_when_it_says_so_or_is_gone_and_not_for_one_late_answer(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], told: list[str]
) -> None:
    left = iter(answers)

    async def asked(*_: object) -> int | None:
        answer = next(left, asyncio.CancelledError)
        if isinstance(answer, type):
            raise answer
        return answer

    monkeypatch.setattr(alone, "health_status", asked)
    monkeypatch.setattr(alone, "HEALTH_EVERY_S", 0.0)
    table = Seen()
    with pytest.raises(asyncio.CancelledError):
        await alone._watch(Instance("PD0", Role.PD, "http://127.0.0.1:1", "static"), table)
    assert table.told == told
