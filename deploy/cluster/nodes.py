"""The nodes of a deployment, as its controller has them: which there are, what each is, how it is spoken to.

That a host is there or has ended is the word of whoever places node processes (`hosts.py`); in between a node says
itself how it is (`deploy/runtime/many.py`). A host that has neither leased devices nor front doors has no node process,
where that gives it back to others. It is a part of the deployment all the same: its devices can be leased at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from deploy.cluster.hosts import Host, Hosts, Reserver
from deploy.cluster.notes import NodeNotes, left_behind
from deploy.control.aim import Aim
from deploy.front.all_doors import AllDoors
from deploy.front.key_watch import Read, of_this_machine
from deploy.front.remote import RemoteDoors
from deploy.launch.life import API_KEYS, Deployment, front_options
from deploy.memory.placement_table import short_node
from deploy.node.facts import NodeFacts, differences
from deploy.node.setup import NodeInfo, NodeSetup, deployment_key
from deploy.options.config import DeployConfig
from deploy.plan.machines import Machines
from deploy.runtime.many import ManyNodes
from deploy.runtime.node_client import NodeClient, NodeHttp, NodeTransport
from deploy.runtime.protocol import Observed
from deploy.runtime.secrets import NodeSecrets
from epd_serve.errors import ConfigError, EpdError
from store.addresses import authority

if TYPE_CHECKING:
    from fastapi import FastAPI

KNOWN, INSTANCES, WANTED = "nodes.json", "instances.json", "nodes-wanted"
"""Notes of what is known of the nodes, of what ran last, and that nodes have been asked for."""

UNUSED_S = 10.0
"""For so long a node is kept on which nothing is leased: what is given back may be leased again at once."""

START_S, ASK_S = 120.0, 5.0
"""For a node process to start and to do what takes long, and to answer."""

TOLD_LOOK_S = 0.05

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Known(msgspec.Struct):
    """What the next controller has to know, too.

    Attributes:
        nonce: makes the key of this deployment another one than that of the last.
        facts: what each node was before anything of ours ran there.
        master: the node that runs the master of the feature store's second tier; its `host:port`, or "" without one.
        back: nodes that came when some had been asked for: they may go with the load, and have no front doors unless
            every node has.
        left_out: nodes that cannot be part of it as long as those are there that are, and why.
    """

    nonce: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    facts: dict[str, NodeFacts] = {}
    master: str = ""
    master_address: str = ""
    back: set[str] = set()
    left_out: dict[str, str] = {}


@dataclass(frozen=True)
class Cluster:
    """What a deployment is served on.

    Attributes:
        kind: of the devices that hosts lend. reserver: keeps others from what is leased of them.
        gives_back: hosts on which nothing of ours runs go back to others.
        begun_on: the host of whoever began it, "" where that is none of them.
        logs: what shows the logs, for people.
        answers: takes the application that operators ask, once there is one. began: of the monotonic clock.
        version: of EPD-Serve, that nodes have to have; "": whatever they have, if it is the same.
    """

    config: DeployConfig
    kind: str
    hosts: Hosts
    members: NodeSecrets
    reserver: Reserver = field(default_factory=Reserver)
    gives_back: bool = False
    begun_on: str = ""
    logs: str = ""
    answers: Callable[[FastAPI], None] = lambda app: None
    began: float = field(default_factory=time.monotonic)
    version: str = ""

    async def noted(self) -> tuple[NodeNotes, tuple[Host, ...]]:
        """What the controller before this one has left, and the hosts that there are for this one."""
        there = await anext(self.hosts.watch())
        noted, there = await left_behind(self.hosts, there, self.members, self.version)
        return NodeNotes(noted, max(noted.epoch + 1, time.time_ns() // 1000)), there


class Nodes:
    """Args:
        say: takes a line for the operator.

    Attributes:
        notes: of the deployment.
        key: of the deployment: whoever has it is one of its processes.
        many: runs the instances.
    """

    def __init__(self, cluster: Cluster, notes: NodeNotes, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._config = cluster.config
        self._hosts = cluster.hosts
        self.notes = notes
        self._say = say
        self._known = msgspec.json.decode(notes.read(KNOWN) or b"{}", type=Known)
        self._there: dict[str, Host] = {}
        self._coming: set[str] = set()
        self._used_s: dict[str, float] = {}  # of nodes with a process of ours: when something was leased there last
        self._one_at_a_time = asyncio.Lock()
        self._warned: set[str] = set()
        self.key = deployment_key(cluster.members.token, cluster.config.name, self._known.nonce)
        self._keep()
        self._deployment: Deployment | None = None
        self._doors: AllDoors | None = None
        remembered = msgspec.json.decode(notes.read(INSTANCES) or b"[]", type=tuple[Observed, ...])
        self._remembered = {one.order.spec.node for one in remembered}
        self.many = ManyNodes(say, remembered)

    def _keep(self) -> None:
        self.notes.write(KNOWN, msgspec.json.encode(self._known))

    @property
    def left_out(self) -> dict[str, str]:
        return self._known.left_out

    async def gather(self, there: Collection[Host]) -> Machines:
        """Of these hosts those that can be nodes, as they were before anything of ours ran on them.

        Raises:
            ConfigError: none has devices of the kind that is wanted, or they differ in what may not differ.
            EpdError: one does not say what it is.
        """
        able = [one for one in there if one.devices and one.id not in self.left_out]
        fitting = [one for one in able if not one.leaving or one.id in self._known.facts]  # what it has is to move
        if not fitting:
            told = "; ".join(f"{one.name} has {one.about or 'no devices'}" for one in there) or "there is none"
            raise ConfigError(f"no node has devices of the kind {self._cluster.kind}: {told}", param="--device")
        if self._config.fronts == "here" and all(one.id != self._cluster.begun_on for one in fitting):
            raise ConfigError(
                f"--fronts here: this host has no {self._cluster.kind} device, and front doors are where some are; "
                "take every",
                param="--fronts",
            )
        await asyncio.gather(*(self._meet(one) for one in fitting))
        return self.machines

    @property
    def machines(self) -> Machines:
        return Machines.of(self._known.facts[node].machine for node in self._there)

    @property
    def devices(self) -> dict[str, Sequence[int]]:
        """What each node lends, under the numbers that its devices have there."""
        facts = self._known.facts
        return {node: facts[node].machine.inventory.ids[: host.devices] for node, host in self._there.items()}

    @property
    def leaving(self) -> set[str]:
        """Nodes that end soon."""
        return {node for node, host in self._there.items() if host.leaving}

    async def _meet(self, host: Host) -> None:
        """Raises ConfigError where it is not as the others are, EpdError where it does not say what it is."""
        if host.id not in self._known.facts:
            asked = self._config, host.id, host.devices
            facts = await self._call(host, lambda http: http.call("facts", NodeFacts, *asked), START_S)
            wanted = self._cluster.version
            if wanted and (version := facts.versions.get("epd-serve")) != wanted:
                raise ConfigError(f"it has EPD-Serve {version}, its controller {wanted}: both have to have the same")
            for other in self._there:
                if differing := differences(facts, self._known.facts[other]):
                    raise ConfigError(
                        f"the nodes of a deployment have to agree: {'; '.join(differing)}", param="--runtime"
                    )
            self._known.facts[host.id] = facts
            self._keep()
        self._there[host.id] = host

    # --- how they are spoken to -----------------------------------------------------------------------------------

    async def open(self, deployment: Deployment, doors: AllDoors) -> None:
        """Has all of them know the deployment, with front doors where they are wanted.

        Raises:
            ConfigError: an address of front doors is taken. EpdError: a node does not begin.
        """
        self._deployment, self._doors = deployment, doors
        known = self._known
        if not known.master:  # the first runs that of the feature store's second tier; the others are told of it
            known.master = min(self._there)
            known.master_address = (await self._set_up(known.master)).master
            self._keep()
        await asyncio.gather(*(self._set_up(node) for node in self._there))
        for node in self._remembered - self._there.keys():  # they have ended while nobody looked
            self.many.lose(node)
        for node in self._there:
            self._join(node)

    def _transport(self, host: Host) -> NodeTransport:
        return NodeTransport(self._cluster.members, partial(self._reach, host), partial(self._set_up, host.id))

    async def _reach(self, host: Host) -> str:
        has_front = host.devices and self._has_front(host.id)
        clients = authority(self._config.host, self._config.port) if has_front else ""
        return await self._hosts.reach(host.id, clients)

    def _join(self, node: str) -> None:
        assert self._doors is not None, "open() has been called"
        host, self._used_s[node] = self._there[node], time.monotonic()
        self.notes.join(node, NodeHttp("/node", self._transport(host), self.notes.epoch))
        self.many.join(node, NodeClient(self._transport(host), self.notes.epoch))
        if self._has_front(node):
            self._doors.join(node, RemoteDoors(self._transport(host), self.notes.epoch))

    async def _set_up(self, node: str) -> NodeInfo:
        """Has it know the deployment, and answer. Raises EpdError."""

        async def told(http: NodeHttp) -> NodeInfo:
            await http.call("setup", NoneType, self._setup(node))
            while not (info := await http.get(NodeInfo)).deployment:  # noqa: ASYNC110 - a moment, once
                await asyncio.sleep(TOLD_LOOK_S)
            return info

        info = await self._asked(node, told, START_S)
        for warning in info.warnings:
            self._warn(f"{self._called(node)}: {warning}")
        return info

    async def _call(self, host: Host, call: Callable[[NodeHttp], Awaitable[T]], within_s: float) -> T:
        """What its node process answers. Raises EpdError: what was refused there, or it does not answer."""
        http = NodeHttp("/node", self._transport(host), self.notes.epoch)
        try:
            async with asyncio.timeout(within_s):
                return await call(http)
        except TimeoutError:
            raise EpdError(f"node {host.name} has not answered for {within_s:g} s") from None
        finally:
            await http.close()

    def _setup(self, node: str) -> NodeSetup:
        assert self._deployment is not None, "open() has been called"
        return NodeSetup(
            deployment=self._config.name,
            node=node,
            config=self._config,
            machine=self._known.facts[node].machine,
            machines=self._deployment.blueprint.machines.nodes,
            nonce=self._known.nonce,
            host=self._config.node_host or self._there[node].address,
            master="" if node == self._known.master else self._known.master_address,
            front=self._has_front(node),
            options=front_options(self.notes),
            api_keys=(self.notes.read(API_KEYS) or b"").decode(),
            notes=self.notes.given(node),
        )

    def _warn(self, text: str) -> None:
        """Once."""
        if text not in self._warned:
            self._warned.add(text)
            self._say(f"warning: {text}")

    def _has_front(self, node: str) -> bool:
        if self._config.fronts == "here":
            return node == self._cluster.begun_on
        return self._config.fronts == "every" or node not in self._known.back

    def _called(self, node: str) -> str:
        return f"node {self._there[node].name} ({short_node(node)})"

    # --- that they come and go ------------------------------------------------------------------------------------

    async def follow(self, aim: Aim) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            async for hosts in self._hosts.watch():
                alive = {one.id: one for one in hosts}
                for node in self._there.keys() - alive.keys():
                    self._lose(node, aim)
                for one in alive.values():
                    if one.id in self._there:
                        self._there[one.id] = one
                    elif one.devices and not (one.leaving or one.id in self._coming or one.id in self.left_out):
                        self._coming.add(one.id)
                        group.create_task(self._welcome(one, aim))

    def _lose(self, node: str, aim: Aim) -> None:
        assert self._doors is not None, "open() has been called"
        self._say(f"{self._called(node)} has gone")
        self.many.lose(node)
        self._doors.lose(node)
        self.notes.lose(node)
        if node == self._known.master and self._known.master_address:
            self._warn("the feature store's second tier has gone with it: features are computed again until a restart")
        self._used_s.pop(node, None)
        del self._there[node]
        self.left_out.clear()  # they may agree with those that are left
        self._keep()
        if self._there:
            aim.machines = self.machines

    async def run_on(self, nodes: Collection[str]) -> None:
        """Have a node process run on each of these nodes that is a part of the deployment, and leave one that has been
        none of them for a while, unless front doors or the master of the second tier are there. All nodes have one
        where nobody else would have the host.

        Raises:
            EpdError: a node does not answer, or its node process does not start.
        """
        if not self._cluster.gives_back:
            return
        async with self._one_at_a_time:
            for node in (self._there.keys() & nodes) - self._used_s.keys():
                await self._set_up(node)
                self._join(node)
            now = time.monotonic()
            self._used_s |= dict.fromkeys(self._used_s.keys() & nodes, now)
            kept = {self._known.master} if self._known.master_address else set()
            for one, used_s in self._used_s.items():
                if now - used_s > UNUSED_S and one not in kept and not self._has_front(one):
                    await self._leave(one)
                    break  # others at the next call

    async def _leave(self, node: str) -> None:
        self.many.rest(node)
        self.notes.lose(node)
        del self._used_s[node]
        try:
            await self._hosts.leave(node)
        except EpdError as error:
            logger.warning("%s", error)

    async def _welcome(self, host: Host, aim: Aim) -> None:
        if self._cluster.gives_back and self.notes.read(WANTED) is not None:
            self._known.back.add(host.id)
            self._keep()
        async with self._one_at_a_time:
            try:
                await self._meet(host)
                await self._set_up(host.id)
            except EpdError as error:
                self._say(f"node {host.name} is left out: {error}")
                self._coming.discard(host.id)  # one of the others may go before its node process has ended
                await self._leave_out(host.id, str(error))
                return
            self._coming.discard(host.id)
            self._join(host.id)
        aim.machines = self.machines
        self._say(f"{self._called(host.id)} has come")

    async def _leave_out(self, node: str, why: str) -> None:
        """Until one of the others goes. Its node process does not run: where it is kept alive the host would never be
        idle."""
        self.left_out[node] = why
        self._keep()
        self._there.pop(node, None)
        with contextlib.suppress(EpdError):
            await self._hosts.leave(node)

    async def part(self) -> None:
        """Nobody is asked anything any more; what runs goes on."""
        await self.notes.parted()
        await self.many.disconnect()

    async def end(self) -> None:
        """Their processes, as far as they answer. One that is started again waits to be told anew."""

        async def of(node: str) -> None:
            with contextlib.suppress(EpdError):
                await self._asked(node, lambda http: http.call("end", NoneType))

        await asyncio.gather(*map(of, self._used_s))

    async def parts(self) -> dict[str, int]:
        """Pids of processes that are no stages, by node and name; without those of who does not answer."""

        async def of(node: str) -> dict[str, int]:
            with contextlib.suppress(EpdError):
                info = await self._asked(node, lambda http: http.get(NodeInfo))
                return {f"{node}/{name}": pid for name, pid in info.pids.items()}
            return {}

        told = await asyncio.gather(self._hosts.parts(), *(of(node) for node in self._used_s))
        return {name: pid for some in told for name, pid in some.items()}

    def key_file(self, path: str) -> Read:
        """Reads the text of the clients' keys, on the host of whoever began the deployment."""
        if not (begun_on := self._cluster.begun_on):
            return of_this_machine(path)
        host = self._there.get(begun_on) or Host(begun_on, short_node(begun_on), 0)
        return lambda: self._call(host, lambda http: http.call("api_keys", str, path), ASK_S)

    async def log(self, node: str, name: str, offset: int) -> tuple[bytes, int]:
        """As `deploy.host.logs.read_log`, of a process on a node. Raises EpdError."""
        return await self._asked(node, lambda http: http.call("log", tuple[bytes, int], name, offset))

    async def _asked(self, node: str, call: Callable[[NodeHttp], Awaitable[T]], within_s: float = ASK_S) -> T:
        """What its node process answers. Raises EpdError, also where it has gone meanwhile."""
        if node in self._there:
            answer = await self._call(self._there[node], call, within_s)
            if node in self._there:
                return answer
        raise EpdError(f"node {node} has gone")
