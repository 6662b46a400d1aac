"""Front doors of several nodes as one: two nodes with real front doors, over ways to them that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any

import httpx
import msgspec
import pytest

from deploy.front import doors as front_doors
from deploy.front.all_doors import AllDoors
from deploy.front.remote import RemoteDoors
from deploy.front.shared import Shared
from deploy.front.traced import about_requests
from deploy.host.ports import private_socket
from deploy.host.rundir import RunDir
from deploy.node.front import STATE, NodeFront
from deploy.node.routes import NodeWatch, serve_node
from deploy.runtime.node_api import LostError, until_lost
from deploy.runtime.node_client import NodeCallError, NodeHttp
from deploy.runtime.protocol import Observed, Order, Phase, Spec
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.config.limits import Timeouts
from proxy.config.settings import ProxySettings
from proxy.records.counts import MINUTE_S
from proxy.records.records import Question
from proxy.registry.instance_state import Work
from tests.deploy.fake_node import FakeNode
from tests.deploy.node_socket import NODE_SOCKET, on_socket, unix_transport
from tests.deploy.rooted_here import RootHere, root_here
from tests.proxy.fakes import FakeStage, answer, bound, once, served, settings, text_body
from tests.waiting import PATIENCE_S, until

PATIENT = settings(timeouts=Timeouts())


class Way(httpx.AsyncBaseTransport):
    """To a node. What is under way when it is cut is not answered.

    Attributes:
        losing: where the path of the request begins whose answer is lost, once.
    """

    def __init__(self, path: Path) -> None:
        self.cut = asyncio.Event()
        self.losing = ""
        self._there = unix_transport(path)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            answer = await until_lost(self._answer(request), self.cut)
        except LostError as error:
            raise httpx.ConnectError("the way there is cut", request=request) from error
        if self.losing and request.url.path.startswith(self.losing):
            self.losing = ""
            raise httpx.ReadError("the answer is lost", request=request)
        return answer

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._there.handle_async_request(request)
        await answer.aread()
        return answer


@dataclass
class Node:
    """One node, whose control this process plays as well as its root."""

    name: str
    run: RunDir
    shared: Shared
    root: RootHere
    url: str
    asked: socket.socket
    way: Way
    config: ProxySettings = PATIENT
    living: asyncio.Task[None] = field(init=False)

    def live(self) -> None:
        """Another life of it."""
        shared, state, watch = replace(self.shared, feed=self.shared.feed.dup()), self.root.state(), NodeWatch()
        front = NodeFront(self.config, PATIENCE_S, self.run, shared, "", self.root.children, state, watch.say)
        agent: Any = FakeNode(self.name)
        self.living = asyncio.create_task(serve_node(on_socket(self.asked.dup()), state, watch, agent, front))

    async def die(self) -> None:
        self.living.cancel()
        await asyncio.wait([self.living])

    def cut_off(self) -> None:
        self.way.cut.set()

    @property
    def pids(self) -> set[int]:
        return {child.pid for child in self.root.children.known if child.poll() is None}

    async def ask(self) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, trust_env=False) as client:
            return await client.post("/v1/chat/completions", json=text_body())

    async def health(self) -> int:
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, trust_env=False) as client:
            return (await client.get("/health")).status_code


@dataclass
class House:
    doors: AllDoors
    nodes: list[Node]
    stage: FakeStage
    observed: Observed
    lines: list[str]

    def publish(self, **changes: Any) -> None:
        self.observed = replace(self.observed, **changes)
        self.doors.publish([self.observed], {Role.PD})

    def join(self, node: Node) -> None:
        self.doors.join(node.name, RemoteDoors(node.way, 1))

    @property
    def held(self) -> int:
        (view,) = self.doors.table.snapshot()
        return view.in_flight[Work.DECODE]


@contextlib.asynccontextmanager
async def house(count: int = 2) -> AsyncIterator[House]:
    """All of it serves."""
    async with made(count) as one:
        async with asyncio.timeout(PATIENCE_S):
            await one.doors.ready()
        yield one


@contextlib.asynccontextmanager
async def made(count: int, config: ProxySettings = PATIENT) -> AsyncIterator[House]:
    async with contextlib.AsyncExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory()))
        stage = FakeStage("PD0", Role.PD)
        instance = Instance("PD0", Role.PD, await stack.enter_async_context(served(stage)), "one")
        observed = Observed(Order("PD0", Spec(Role.PD, (0,), "d")), Phase.UP, instance, ever_up=True, start_s=1.0)
        nodes, lines = [], list[str]()
        for number in range(count):
            run = RunDir.create(root)
            stack.callback(run.remove)
            listening = stack.enter_context(bound())
            shared = Shared.of(listening, stack.enter_context(private_socket(run.feed)), 1)
            stack.callback(shared.close)
            asked = stack.enter_context(private_socket(run.socket(NODE_SOCKET)))
            asked.listen()
            rooted = stack.enter_context(root_here())
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            nodes.append(Node(f"n{number}", run, shared, rooted, url, asked, Way(run.socket(NODE_SOCKET)), config))
            nodes[-1].live()
        doors = AllDoors(say=lines.append)
        serving = asyncio.create_task(doors.serve())
        one = House(doors, nodes, stage, observed, lines)
        for node in nodes:
            one.join(node)
        one.publish()
        try:
            yield one
        finally:
            for node in nodes:
                node.way.cut.clear()
                one.join(node)
            async with asyncio.timeout(PATIENCE_S):
                await doors.end()
            for node in nodes:
                await node.die()
                assert not node.pids
            serving.cancel()
            await asyncio.wait([serving])


async def test_all_nodes_answer_and_what_they_hold_is_summed() -> None:
    async with house() as h:
        released = asyncio.Event()
        h.stage.usual = once(released, answer)
        asked = [asyncio.create_task(node.ask()) for node in h.nodes for _ in range(2)]
        await until(lambda: h.held == 4)
        await until(lambda: h.doors.running == 4)
        assert sorted(h.doors.pids) == ["n0/front.0", "n1/front.0"]
        released.set()
        assert {one.status_code for one in await asyncio.gather(*asked)} == {200}
        await until(lambda: h.held == 0)

        async def counted() -> bool:
            text = (await h.doors.metrics()).decode()
            ended = [line for line in text.splitlines() if line.startswith("epd_proxy_requests_total{")]
            return sum(float(line.rpartition(" ")[2]) for line in ended) == 4

        await until(counted)


async def test_whichever_node_had_a_request_it_is_found_and_a_node_that_does_not_answer_is_left_out() -> None:
    async with house() as h:
        h.publish()
        await h.doors.ready()
        ids = [(await node.ask()).headers["x-request-id"] for node in h.nodes]
        for name in ids:
            (told,) = (await h.doors.look(Question(id=name))).requests
            assert told["id"] == name and told["decode"] == h.observed.order.id

        async def counted() -> bool:
            counts = (await h.doors.look(Question(window_s=MINUTE_S))).counts
            return counts is not None and sum(counts.outcomes.values()) == len(ids)

        await until(counted)
        h.nodes[0].cut_off()
        listed = (await h.doors.look(Question(limit=10))).requests
        assert [one["id"] for one in listed] == ids[1:]
        counts = (await h.doors.look(Question(window_s=MINUTE_S))).counts
        assert counts is not None and (counts.answered, counts.serving) == (1, 2)
        assert counts.kinds["text"].requests == counts.kinds["text"].ended == 1, "of the node that has answered"


async def test_stamps_of_nodes_that_share_a_folder_are_told_once_each_with_its_clock(tmp_path: Path) -> None:
    async with made(2, replace(PATIENT, trace_path=str(tmp_path / "proxy.jsonl"))) as h:
        await h.doors.ready()
        name = (await h.nodes[1].ask()).headers["x-request-id"]
        (told,) = (await h.doors.look(Question(id=name))).requests
        assert told["door"] == f"{h.nodes[1].name}/front.0"
        nodes = await about_requests(h.doors.traced, [name])
        assert [node.node for node in nodes] == [node.name for node in h.nodes]
        assert all(abs(node.offset_s) <= node.uncertainty_s + 1e-6 for node in nodes), "one machine has one clock"
        events = [stamp.event for node in nodes for stamp in node.stamps]
        assert events.count("arrived") == events.count("dispatched") == 1 and not nodes[1].stamps


async def test_a_front_part_that_dies_costs_no_front_door_and_knows_again_what_it_was_told() -> None:
    async with house(1) as h:
        node, before = h.nodes[0], h.nodes[0].pids
        node.cut_off()  # nobody tells it anything more
        await node.die()
        assert (await node.ask()).status_code == 200
        node.live()
        (victim,) = before
        os.kill(victim, signal.SIGKILL)
        await until(lambda: node.pids and victim not in node.pids)
        assert (await node.ask()).status_code == 200, "a front door that starts now knows of the instances"
        node.way.cut.clear()
        h.publish(phase=Phase.DOWN, reason="gone", start_s=0.0)
        async with asyncio.timeout(PATIENCE_S):
            await h.doors.seen()
        assert await node.health() == 503


async def test_a_state_that_is_overtaken_by_a_newer_one_is_not_gone_back_to() -> None:
    async with made(1) as h:
        h.publish()
        await asyncio.wait_for(h.doors.ready(), PATIENCE_S)
        http = NodeHttp("/front", h.nodes[0].way, 1)
        older = h.doors.state()
        h.doors.drain("PD0")
        await asyncio.wait_for(h.doors.seen(), PATIENCE_S)
        assert older is not None
        await http.call("take_in", NoneType, older)
        noted = msgspec.msgpack.decode(h.nodes[0].root.state().read(STATE) or b"")
        assert noted["state"]["leaving"] == ["PD0"]


async def test_who_comes_late_or_again_is_told_everything() -> None:
    async with house() as h:
        late = h.nodes[1]
        late.cut_off()
        h.doors.pause(PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            await h.doors.fronts["n0"].told("seen")
        waiting = asyncio.create_task(h.nodes[0].ask())
        h.doors.drain("PD0")
        late.way.cut.clear()
        async with asyncio.timeout(PATIENCE_S):
            await h.doors.seen()
        also_waiting = asyncio.create_task(late.ask())
        await asyncio.sleep(0.2)
        assert not waiting.done() and not also_waiting.done()
        h.doors.drain("PD0", False)
        h.doors.pause(0.0)
        assert {(await one).status_code for one in (waiting, also_waiting)} == {200}


async def test_an_instance_is_empty_when_every_node_has_nothing_left_on_it() -> None:
    async with house() as h:
        released = asyncio.Event()
        h.stage.usual = once(released, answer)
        asked = asyncio.create_task(h.nodes[1].ask())
        await until(lambda: h.held == 1)
        h.doors.drain("PD0")
        empty = asyncio.create_task(h.doors.until_empty("PD0"))
        await asyncio.sleep(0.3)
        assert not empty.done()
        h.nodes[1].cut_off()
        released.set()
        await asked
        await asyncio.sleep(0.3)
        assert not empty.done(), "who is silent may have something left"
        h.nodes[1].way.cut.clear()
        async with asyncio.timeout(PATIENCE_S):
            await empty


async def test_a_node_that_is_lost_is_left_out() -> None:
    async with house() as h:
        for _ in range(3):
            assert (await h.nodes[1].ask()).status_code == 200
        await h.doors.metrics()
        h.nodes[1].cut_off()
        seen = asyncio.create_task(h.doors.seen())
        await asyncio.sleep(0.2)
        assert not seen.done()
        h.doors.lose("n1")
        async with asyncio.timeout(PATIENCE_S):
            await seen
        assert sorted(h.doors.pids) == ["n0/front.0"]
        text = (await h.doors.metrics()).decode()
        ended = [line for line in text.splitlines() if line.startswith("epd_proxy_requests_total{")]
        assert sum(float(line.rpartition(" ")[2]) for line in ended) == 3, "what it did is still counted"


@pytest.mark.slow
async def test_front_doors_are_replaced_node_by_node_with_other_options() -> None:
    async with house() as h:
        before = dict(h.doors.pids)
        async with asyncio.timeout(PATIENCE_S):
            await h.doors.configure(replace(PATIENT, served_models=("another",)))
            h.nodes[0].way.losing = "/front/restart"
            await h.doors.restart()
        assert not h.nodes[0].way.losing
        await until(lambda: len(h.doors.pids) == 2 and not set(before.values()) & set(h.doors.pids.values()))
        assert [len(node.root.children.known) for node in h.nodes] == [2, 2], "each was replaced once"
        for node in h.nodes:
            async with httpx.AsyncClient(base_url=node.url, trust_env=False) as client:
                assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["another"]


async def test_front_doors_that_do_not_start_are_said_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"PYTHONHOME": "/nonexistent"}  # Python itself does not start
    monkeypatch.setattr(front_doors, "module_environment", lambda: {**os.environ, **broken})
    async with made(1) as h:
        with pytest.raises(NodeCallError, match="did not start"):
            async with asyncio.timeout(PATIENCE_S):
                await h.doors.ready()
        await until(lambda: "tried again" in capsys.readouterr().err)
        broken.clear()

        async def ready() -> bool:
            with contextlib.suppress(NodeCallError):
                await h.doors.ready()
                return True
            return False

        await until(ready, "front doors of another try")
        assert h.doors.pids
