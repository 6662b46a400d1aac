"""Failures on demand, at run time and from the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from deploy.host.ports import free_ports
from epd_serve.errors import ConfigError
from epd_serve.sim.faults import SimFaults, fault_of
from epd_serve.sim.prompts import CHAT
from tests.epd_serve.sim.served import chat, served
from tests.waiting import wait_for

DEADLINE_S = 60.0


async def test_errors_refusals_and_broken_connections_on_demand() -> None:
    async with served() as (_, client):
        shown = (await client.post("/sim/faults", json={"error_rate": 1, "error_status": 502})).json()
        assert shown["error_rate"] == 1 and shown == (await client.get("/sim/faults")).json()
        assert (await client.post(CHAT, json=chat())).status_code == 502
        await client.post("/sim/faults", json={"error_rate": 0, "refuse": True})
        assert (await client.post(CHAT, json=chat())).status_code == 503
        assert (await client.get("/health")).status_code == 200
        await client.post("/sim/faults", json={"refuse": False, "break_rate": 1})
        with pytest.raises(httpx.TransportError):
            await client.post(CHAT, json=chat())
        with pytest.raises(httpx.TransportError):
            async with client.stream("POST", CHAT, json=chat(stream=True)) as response:
                await response.aread()
        await client.post("/sim/faults", json={"break_rate": 0})
        assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_a_stage_gets_slow_on_demand() -> None:
    async with served() as (engine, client):
        await client.post("/sim/faults", json={"slow": 2.5})
        assert engine.slowness == 2.5


@pytest.mark.parametrize(
    "body", [{"eror_rate": 1}, {"error_rate": 2}, {"slow": -1}, {"refuse": 1}, {"error_status": 200}, {"crash": 1}]
)
async def test_a_wrong_fault_is_refused_and_changes_nothing(body: dict[str, object]) -> None:
    async with served() as (_, client):
        answer = await client.post("/sim/faults", json={"drop_features": 1, **body})
        assert answer.status_code == 400 and next(iter(body)) in answer.json()["error"]["message"]
        assert (await client.get("/sim/faults")).json()["drop_features"] == 0


def test_draws_are_the_same_in_every_run() -> None:
    def drawn() -> list[bool]:
        faults = SimFaults()
        faults.change({"seed": 3})
        return [faults.hits(0.5) for _ in range(20)]

    assert drawn() == drawn() and set(drawn()) == {True, False}


def test_faults_of_the_command_line() -> None:
    assert fault_of("error_rate=0.5") == {"error_rate": 0.5} and fault_of("refuse=true") == {"refuse": True}
    for wrong in ("refuse", "error_rate=much"):
        with pytest.raises(ConfigError, match="fault"):
            fault_of(wrong)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_a_process_hangs_and_crashes_on_demand() -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "epd_serve.sim", "--port", str(port), "--fault", "error_rate=0.25"]
    stage = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S, trust_env=False) as client:
            _until_up(client)
            assert client.get("/sim/faults").json()["error_rate"] == 0.25
            with pytest.raises(httpx.TimeoutException):
                client.post("/sim/faults", json={"hang_s": 3600}, timeout=0.2)
            wait_for(lambda: _state(stage.pid) == "T")
            os.kill(stage.pid, signal.SIGCONT)
            assert client.get("/health").status_code == 200
            with pytest.raises(httpx.TransportError):
                client.post("/sim/faults", json={"crash": True})
        assert stage.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        stage.kill()
        stage.wait()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _until_up(client: httpx.Client) -> None:
    def up() -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(up)
