"""Several proxy processes as an operator has them: real processes that are killed, told to end, or do not start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from deploy.host import processes
from deploy.host.environment import LAUNCHER_PID_ENV
from deploy.host.launches import reap_dead
from deploy.host.ports import free_ports
from epd_serve.roles import Role
from tests.deploy.launched import REPOSITORY, FakeLaunch
from tests.proxy.fakes import FakeStage, answer, once, served, text_body
from tests.waiting import until, wait_for

DEADLINE_S = 60.0
HELD = 9


class Proxy:
    """`epd-serve proxy --stages` with workers, in front of a stage of this process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, stage: FakeStage) -> None:
        self.process = process
        self.stage = stage
        self._url = f"http://127.0.0.1:{port}"

    async def ask(self, path: str = "") -> httpx.Response | None:
        """On a connection of its own; None where that broke."""
        async with httpx.AsyncClient(base_url=self._url, timeout=DEADLINE_S, trust_env=False) as client:
            try:
                if path:
                    return await client.get(path)
                return await client.post("/v1/chat/completions", json=text_body(model="m"))
            except httpx.TransportError:
                return None

    async def until(self, path: str, condition: Callable[[httpx.Response], Any]) -> None:
        async def met() -> bool:
            answered = await self.ask(path)
            return answered is not None and bool(condition(answered))

        await until(met, path)

    def workers(self) -> set[int]:
        mark = str(self.process.pid)
        return {one.pid for one in processes.running() if processes.has_environment(one.pid, LAUNCHER_PID_ENV, mark)}


class WithHealth:
    """A fake stage that says that it is well, too."""

    def __init__(self, stage: FakeStage) -> None:
        self._stage = stage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/health":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})
        else:
            await self._stage(scope, receive, send)


def in_flight(answered: httpx.Response) -> int:
    return sum(sum(row["in_flight"].values()) for row in answered.json()["instances"])


@asynccontextmanager
async def proxy(folder: Path, workers: int) -> AsyncIterator[Proxy]:
    stage = FakeStage("PD0", Role.PD)
    (port,) = free_ports(1)
    async with served(WithHealth(stage)) as url:
        file = folder / "stages.yaml"
        file.write_text(f"model: m\nstages: [{{id: PD0, role: PD, url: '{url}'}}]\n")
        argv = [sys.executable, "-m", "deploy.cli", "proxy", "--stages", str(file), "--run-root", str(folder / "run")]
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [*argv, "--port", str(port), "--workers", str(workers), "--lame-duck-s", "0", "--drain-s", str(DEADLINE_S)],
            env={**os.environ, "PYTHONPATH": path},
        )
        started = Proxy(process, port, stage)
        try:
            await started.until("/health", lambda answered: answered.status_code == 200)
            await started.until("/metrics", lambda answered: f"epd_proxy_workers {workers}.0" in answered.text)
            yield started
        finally:
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(process.wait, DEADLINE_S)
            reap_dead(folder / "run")  # of one that was killed


async def test_a_worker_killed_under_load_is_replaced_and_sigterm_cuts_nobody_off(
    tmp_path: Path,
) -> None:
    released = asyncio.Event()
    async with proxy(tmp_path, workers=3) as p:
        p.stage.usual = once(released, answer)
        asked = [asyncio.create_task(p.ask()) for _ in range(HELD)]
        await p.until("/instances", lambda answered: in_flight(answered) == HELD)
        before = p.workers()
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        # Who was connected to it knows at once; nobody else notices.
        await p.until("/instances", lambda answered: in_flight(answered) == HELD - sum(one.done() for one in asked))
        assert all(one.result() is None for one in asked if one.done())
        p.stage.usual = answer
        assert (await p.ask()).status_code == 200
        await p.until("/metrics", lambda answered: "epd_proxy_workers 3.0" in answered.text)
        after = p.workers()
        assert len(after) == 3
        assert before - after == {victim}
        released.set()
        outcomes = await asyncio.gather(*asked)
        assert {one.status_code for one in outcomes if one is not None} == {200}
        await p.until("/instances", lambda answered: in_flight(answered) == 0)
        await p.until("/metrics", lambda answered: "epd_proxy_in_flight 0.0" in answered.text)
        # The end: what is in flight finishes, whichever process has it.
        released.clear()
        p.stage.usual = once(released, answer)
        asked = [asyncio.create_task(p.ask()) for _ in range(HELD)]
        await p.until("/instances", lambda answered: in_flight(answered) == HELD)
        p.process.terminate()
        await p.until("/health", lambda answered: answered.status_code == 503)
        released.set()
        assert {one.status_code for one in await asyncio.gather(*asked)} == {200}
        assert await asyncio.to_thread(p.process.wait, DEADLINE_S) == 0
        assert are_gone(after)


async def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    async with proxy(tmp_path, workers=2) as p:
        workers = p.workers()
        assert len(workers) == 2
        p.process.kill()
        await asyncio.to_thread(wait_for, lambda: are_gone(workers), "the workers are gone")


def are_gone(pids: set[int]) -> bool:
    return not any(found is not None and not found.dead for found in map(processes.stat, pids))


def test_a_launch_with_workers_serves_and_ctrl_c_leaves_nothing(launch: Callable[..., FakeLaunch]) -> None:
    one = launch("(E-P)-D", "+workers=2")
    one.wait_ready()
    launch_id = one.run_path.name
    wait_for(lambda: all(row["up"] for row in one.instances().values()), "all up")
    assert len(one.instances()) == 3
    _, err = one.end(signal.SIGINT)
    assert one.process.returncode == 0, err
    one.assert_nothing_remains(launch_id)
