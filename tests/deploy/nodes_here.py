"""Several nodes on this machine: an agent of each in this process, and a proxy in front of all their instances."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from deploy.agent.agent import Agent
from deploy.agent.setup import AgentSetup
from deploy.agent.specs import orders
from deploy.agent.wiring import Net
from deploy.host.rundir import RunDir
from deploy.plan.blueprint import Blueprint
from deploy.plan.proxy_settings import build_proxy_settings
from deploy.runtime.protocol import Observed, Phase
from epd_serve.instances import Instance
from epd_serve.peers import Peer, peer_of
from proxy.http.app import create_app
from proxy.registry.table import InstanceTable
from tests.deploy.rooted_here import root_here
from tests.proxy.fakes import served
from tests.waiting import PATIENCE_S, until

PORTS = range(20000, 25000)
SHM_MIB = 700  # of each node


@dataclass
class Nodes:
    """What runs on them.

    Attributes:
        seen: what the agents tell, by instance; agents, runs: by node.
        table: of the proxy. client: asks it.
    """

    key_file: str
    agents: dict[str, Agent] = field(default_factory=dict)
    runs: dict[str, RunDir] = field(default_factory=dict)
    seen: dict[str, Observed] = field(default_factory=dict)
    table: InstanceTable = field(default_factory=InstanceTable)
    client: httpx.AsyncClient = field(init=False)
    url: str = ""

    def setup(self, folder: Path, blueprint: Blueprint, net: Net) -> AgentSetup:
        """Of the agent of one node."""
        run = self.runs[net.node] = RunDir.create(folder / net.node)
        return AgentSetup.of(run, blueprint, net=net, shm_mib=SHM_MIB)

    def instance(self, name: str) -> Instance:
        """In its life of now."""
        found = self.seen[name].instance
        assert found is not None, f"{name} has not begun"
        return found

    def stage_log(self, name: str) -> str:
        return self.runs[self.instance(name).node].log(name).read_text(errors="replace")

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """What the proxy tells of each instance."""
        answer = (await self.client.get("/instances")).json()
        return {entry["id"]: entry for entry in answer["instances"]}

    async def link(self, sender: str, taker: str) -> dict[str, Any]:
        """The first KV link between two instances, once it is up."""

        async def found() -> dict[str, Any] | None:
            links = (await self.statuses())[sender]["kv_links"]
            return next((one for one in links if one["peer"] == taker and one["state"] == "up"), None)

        link: dict[str, Any] = await until(found, f"{sender} to reach {taker}")
        return link

    async def follow(self, node: str) -> None:
        """Keep the table as this node's agent says, and tell the others who is there, as a controller does."""
        async with contextlib.aclosing(self.agents[node].watch()) as watch:
            async for item in watch:
                self.seen |= {one.order.id: one for one in item}
                for one in item:
                    if one.instance is not None:
                        self.table.apply(one.instance, up=False)
                    if one.phase is Phase.UP:
                        self.table.mark_up(one.order.id)
                await self.tell_peers()

    async def tell_peers(self) -> None:
        for name, agent in self.agents.items():
            await agent.know(tuple(peer for peer in self._peers() if peer.node != name))

    def _peers(self) -> list[Peer]:
        return [peer_of(one.instance, one.order.spec.role) for one in self.seen.values() if one.instance is not None]

    async def up(self, *names: str) -> None:
        await until(lambda: all(name in self.seen and self.seen[name].phase is Phase.UP for name in names), "all up")


@contextlib.asynccontextmanager
async def nodes(
    folder: Path, blueprint: Blueprint, hosts: Mapping[str, str], where: Mapping[str, str]
) -> AsyncIterator[Nodes]:
    """All instances of the blueprint up, and the proxy. The first node has the master of the second tier, if any.

    Args:
        hosts: address of each node. where: the node of each instance.
    """
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(os.urandom(32).hex())
    made = Nodes(str(key))
    async with contextlib.AsyncExitStack() as stack:
        master = ""
        for name, host in hosts.items():
            at = replace(blueprint, config=replace(blueprint.config, mooncake_master=master))
            setup = made.setup(folder, at, Net(name, host, made.key_file, PORTS))
            made.agents[name] = await stack.enter_async_context(_running(setup))
            master = setup.tier.address
        following = [asyncio.create_task(made.follow(name)) for name in hosts]
        stack.callback(lambda: [task.cancel() for task in following])
        app = create_app(replace(build_proxy_settings(blueprint), key_file=str(key), explain=True), made.table)
        made.url = await stack.enter_async_context(served(app))
        made.client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=made.url, timeout=PATIENCE_S, trust_env=False)
        )
        for order in orders(blueprint):
            node = where[order.id]
            await made.agents[node].start(replace(order, spec=replace(order.spec, node=node)))
        await made.up(*where)
        yield made
        for task in following:
            assert not task.done(), task.exception()


@contextlib.asynccontextmanager
async def _running(setup: AgentSetup) -> AsyncIterator[Agent]:
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(root_here())
        stack.callback(setup.run.remove)
        agent = Agent(setup, root.children, root.state(), say=print)
        async with agent.running():
            try:
                yield agent
            finally:
                await agent.close()
