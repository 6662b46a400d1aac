"""The Node actor without Ray, in this process: finds or starts the node process, keeps its clients' socket, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from deploy.ray import node_actor
from deploy.ray.node_actor import NodeActor
from tests.deploy.node.nodes import Deployment, deployment
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.asyncio


def actor_of(d: Deployment, monkeypatch: pytest.MonkeyPatch, secrets: str = "") -> NodeActor:
    """Whose raylet is the owner of the deployment."""
    monkeypatch.setattr(node_actor, "_raylet", lambda: d.owner.pid)
    return NodeActor("a", "127.0.0.1", "20000-24999", secrets or str(d.folder), str(d.root))


async def test_a_client_who_comes_between_two_node_processes_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(tmp_path) as d:
        actor, clients = actor_of(d, monkeypatch), f"127.0.0.1:{d.port}"
        assert await actor.find() == ""
        address, trouble = await actor.reach(clients)
        assert address and not trouble and await actor.find() == address == (await actor.reach(clients))[0]
        first = await d.start("a", front=True)
        assert first.address == address
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: not d.processes(), "all of it to end")
        answer, question = await asyncio.open_connection("127.0.0.1", d.port)
        question.write(b"GET /v1/models HTTP/1.1\r\nhost: here\r\n\r\n")
        assert (await actor.reach(clients))[1] == ""
        await d.start("a", front=True)
        d.join("a", front=True)
        async with d.controlled(d.orders("a")), asyncio.timeout(PATIENCE_S):
            assert await answer.readline() == b"HTTP/1.1 200 OK\r\n"
        question.close()
        await actor.end()
        assert await d.answers() == 0, "nobody is there any more"
        assert "has been ended" in (await actor.reach(clients))[1], "a call that the end has overtaken begins nothing"
        assert not [name for name in ("a.json", "a.log") if (tmp_path / name).exists()]


async def test_another_actor_finds_the_node_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployment(tmp_path) as d:
        address, _ = await actor_of(d, monkeypatch).reach("")
        await d.start("a")
        assert await actor_of(d, monkeypatch).reach("") == (address, "")
        await actor_of(d, monkeypatch).end()


async def test_what_keeps_a_node_process_from_beginning_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment(tmp_path) as d, deployment(tmp_path) as other:
        nowhere = actor_of(d, monkeypatch, str(tmp_path / "nowhere"))
        address, trouble = await nowhere.reach("")
        assert not address and "tls.key" in trouble
        with contextlib.closing(await asyncio.start_server(lambda *_: None, "127.0.0.1", other.port)):
            address, trouble = await actor_of(d, monkeypatch).reach(f"127.0.0.1:{other.port}")
            assert not address and f"port {other.port} is in use" in trouble


@pytest.mark.slow
async def test_it_is_ended_by_force_where_it_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployment(tmp_path) as d:
        actor = actor_of(d, monkeypatch)
        await actor.reach("")
        run = await d.start("a")
        os.kill(run.pid, signal.SIGSTOP)
        monkeypatch.setattr(node_actor, "END_S", 0.5)
        await actor.end()
        assert not run.lives
        await d.start("a")  # cleans up after it
        assert not run.path.exists()
