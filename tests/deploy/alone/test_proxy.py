"""The proxy alone, in front of stages that somebody else runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.alone import proxy
from deploy.alone.proxy import run_proxy
from deploy.front.doors import FrontDoors
from deploy.host.logs import KEPT_BYTES
from deploy.host.ports import free_ports
from deploy.options.config import ProxyConfig
from epd_serve.errors import EpdError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.workers.wire import Row
from tests.deploy.alone.test_stages import stages_file
from tests.deploy.client_keys import client_keys
from tests.proxy.fakes import data_url, image_body, image_file
from tests.stage_http import stage_client
from tests.waiting import PATIENCE_S, wait_for

REPOSITORY = Path(__file__).parents[3]
FAKE_STAGE = str(Path(__file__).parents[1] / "fake_stage.py")
PATH = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


@contextmanager
def running(*argv: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *argv], env={**os.environ, "PYTHONPATH": PATH}, **more)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)  # a proxy that is killed leaves its run directory to the next one
        process.wait(PATIENCE_S)


def status(port: int, path: str = "/health", key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_health(port: int, expected: int) -> None:
    wait_for(lambda: status(port) == expected, f"/health to be {expected}")


def key_file(folder: Path, name: str, key: str) -> str:
    path = folder / name
    path.touch(mode=0o600)
    path.write_text(key)
    return str(path)


def test_what_ends_the_front_door_is_one_named_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def fails(_: FrontDoors) -> None:
        raise EpdError("front.0 did not start: exit code 1")

    monkeypatch.setattr(FrontDoors, "serve", fails)
    stages = stages_file(tmp_path, "model: m\nstages: [{id: PD0, role: PD, url: 'http://127.0.0.1:1'}]\n")
    (port,) = free_ports(1)
    with pytest.raises(EpdError, match="did not start"):
        run_proxy(ProxyConfig(stages=stages, port=port, lame_duck_s=0.0, drain_s=0.0, run_root=str(tmp_path / "run")))
    assert list((tmp_path / "run").iterdir()) == []


def test_the_proxy_alone_follows_its_stages_asks_for_keys_and_ends_on_sigterm(tmp_path: Path) -> None:
    port, stage_port, admin_port = free_ports(3)
    keys, run = client_keys(tmp_path / "keys", "one", "two"), tmp_path / "run"
    text = f"model: m\nstages: [{{id: EPD0, role: EPD, url: 'http://127.0.0.1:{stage_port}'}}]\n"
    argv = ["-m", "deploy.cli", "proxy", "--stages", stages_file(tmp_path, text), "--port", str(port)]
    argv += ["--api-key-file", keys, "--lame-duck-s", "0", "--run-root", str(run), "--admin-port", str(admin_port)]
    with running(*argv, stderr=subprocess.PIPE) as alone:
        wait_health(port, 503)
        with running(FAKE_STAGE, str(stage_port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            wait_health(port, 200)
            assert [status(port, "/v1/models", key) for key in ("one", "two", "three")] == [200, 200, 401]
            assert [status(port, path, "one") for path in ("/metrics", "/instances")] == [404, 404]
            client_keys(tmp_path / "keys", "three")
            wait_for(lambda: status(port, "/v1/models", "three") == 200, "the new key")
            assert status(port, "/v1/models", "one") == 401
            assert [status(admin_port, path) for path in ("/metrics", "/instances")] == [200, 200]
        wait_health(port, 503)
        alone.send_signal(signal.SIGTERM)
        _, err = alone.communicate(timeout=PATIENCE_S)
        assert alone.returncode == 0, err
    assert list(run.iterdir()) == []


def test_listed_stages_that_want_a_key_get_it_and_strangers_get_nothing(tmp_path: Path) -> None:
    port, stage_port = free_ports(2)
    key = "0123456789abcdef"
    guarded = ["--stage-key-file", key_file(tmp_path, "key", key)]
    stage = ["-m", "deploy.cli", "stage", "--engine", "sim", "--role", "EPD", "--port", str(stage_port), *guarded]
    listed = ["-m", "deploy.cli", "proxy", "--stage", f"http://127.0.0.1:{stage_port}", *guarded]
    listed += ["--served-model-name", "epd-demo", "--port", str(port), "--run-root", str(tmp_path / "run")]
    with running(*stage), running(*listed, "--lame-duck-s", "0"):
        wait_health(port, 200)
        assert [status(stage_port, "/v1/models", word) for word in ("", "another-key-of-16", key)] == [401, 401, 200]
        body = b'{"model": "epd-demo", "prompt": "hi", "max_tokens": 2}'
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert answer.status == 200


def test_an_encoder_that_somebody_else_runs_encodes_for_a_stage_beside_it(tmp_path: Path) -> None:
    port, encoder_port, stage_port = free_ports(3)
    guarded = ["--stage-key-file", key_file(tmp_path, "key", "0123456789abcdef")]
    stage = ["-m", "deploy.cli", "stage", "--engine", "sim", *guarded]
    listed = ["--stage", f"E=http://127.0.0.1:{encoder_port}", "--stage", f"PD=http://127.0.0.1:{stage_port}"]
    proxy = ["-m", "deploy.cli", "proxy", *listed, *guarded, "--served-model-name", "epd-demo", "--port", str(port)]
    with (
        running(*stage, "--role", "E", "--port", str(encoder_port)),
        running(*stage, "--role", "PD", "--port", str(stage_port)),
        running(*proxy, "--proxy", "explain=true", "--run-root", str(tmp_path / "run"), "--lame-duck-s", "0"),
    ):
        wait_health(port, 200)
        wait_for(lambda: status(port, "/health?role=encode") == 200, "the encoder")
        assert [status(port, f"/health?role={role}") for role in ("prefill-decode", "encode-prefill")] == [200, 404]
        body = json.dumps({**image_body(data_url(image_file())), "model": "epd-demo", "max_tokens": 2}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body)
        request.add_header("content-type", "application/json")
        request.add_header("x-epd-explain", "1")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert answer.status == 200
            assert answer.headers["x-epd-path"] == "E-PD" and "E0" in answer.headers["x-epd-instances"]
        encoded = ask_for_features(f"http://127.0.0.1:{encoder_port}", "0123456789abcdef")
        assert list(encoded) == ["one-image"] and encoded["one-image"]["metadata"]["image_grid_thw"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask_for_features(f"http://127.0.0.1:{encoder_port}", "another-key-of-16")


def ask_for_features(url: str, key: str) -> dict[str, Any]:
    """What llm-d's coordinator and vLLM's router ask an encoder: a chat of one image, for its `ec_transfer_params`."""
    shown = {"type": "image_url", "image_url": {"url": data_url(image_file())}, "uuid": "one-image"}
    body = {"model": "epd-demo", "messages": [{"role": "user", "content": [shown]}], "max_tokens": 1, "stream": False}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    for name, value in (("content-type", "application/json"), ("EPP-Profile", "encode"), ("x-request-id", "r:0:1")):
        request.add_header(name, value)
    request.add_header("authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        features: dict[str, Any] = json.loads(answer.read())["ec_transfer_params"]
    return features


def test_logs_of_its_front_doors_are_where_it_says_and_stay_small(tmp_path: Path) -> None:
    stages = stages_file(tmp_path, "model: m\nstages: [{id: PD0, role: PD, url: 'http://127.0.0.1:1'}]\n")
    (port,) = free_ports(1)
    argv = ["-m", "deploy.cli", "proxy", "--stages", stages, "--port", str(port), "--run-root", str(tmp_path / "run")]
    with running(*argv, "--lame-duck-s", "0", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        folder = Path(process.stderr.readline().decode().strip().rpartition("logs in ")[2])
        wait_health(port, 503)
        log = folder / "front.0.log"
        with log.open("ab") as file:
            file.write(b"something, again and again\n" * (3 * KEPT_BYTES // 27))
        wait_for(lambda: log.stat().st_blocks * 512 < 2 * KEPT_BYTES, "a log that is kept small")
    assert not folder.exists()


def test_a_stage_on_a_port_has_a_key_of_its_own_and_one_on_a_socket_needs_none(tmp_path: Path) -> None:
    (port,), home = free_ports(1), {**os.environ, "PYTHONPATH": PATH, "XDG_RUNTIME_DIR": str(tmp_path)}
    stage = [sys.executable, "-m", "deploy.cli", "stage", "--engine", "sim", "--role", "EPD"]
    on_port = subprocess.Popen([*stage, "--port", str(port)], env=home)
    on_socket = subprocess.Popen([*stage, "--uds", "s.http"], env=home, cwd=tmp_path)
    try:
        wait_for(lambda: status(port) == 200, "the stage on the port")
        (file,) = tmp_path.rglob(f"stage-{port}.key")
        assert file.stat().st_mode & 0o777 == 0o600
        assert [status(port, "/v1/models", key) for key in ("", file.read_text())] == [401, 200]
        with stage_client(f"unix:{tmp_path}/s.http") as client:
            wait_for((tmp_path / "s.http").exists, "the stage on the socket")
            assert client.get("/v1/models").status_code == 200
    finally:
        for process in (on_port, on_socket):
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


class Seen:
    """Front doors that note what they are told of the one stage there is."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, rows: Iterable[Row], wanted: Iterable[Role]) -> None:
        (row,) = rows
        self.told.append("up" if row.healthy else row.reason)


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

    monkeypatch.setattr(proxy, "health_status", asked)
    monkeypatch.setattr(proxy, "HEALTH_EVERY_S", 0.0)
    doors, stage = Seen(), Instance("PD0", Role.PD, "http://127.0.0.1:1", "static")
    health = proxy._Health([stage], doors)  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await health.watch(stage)
    assert doors.told == ["starting", *told]
