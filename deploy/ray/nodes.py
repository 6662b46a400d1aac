"""The nodes of a deployment, as its controller has them: which there are, what each is, how it is spoken to.

That a node is there or has ended is Ray's word; in between it says itself how it is (`deploy/runtime/many.py`).

To Ray's autoscaler a node with an actor is never idle, so a node that has neither leased devices nor front doors has
none of ours. It is a part of the deployment all the same: its devices can be leased at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import msgspec
import ray
from ray.exceptions import RayError

from deploy.control.aim import Aim
from deploy.front.all_doors import AllDoors
from deploy.front.remote import RemoteDoors
from deploy.host.state import State
from deploy.launch.life import Deployment, front_options
from deploy.memory.placement_table import short_node
from deploy.node.facts import NodeFacts, differences
from deploy.node.start import NodeRun, NodeSetup
from deploy.options.addresses import port_range
from deploy.options.config import DeployConfig
from deploy.plan.machines import Machines
from deploy.ray.cluster import NAMESPACE, Actor, HttpAnswer, RayNode, node_name, nodes_alive, question_of
from deploy.ray.leases import RESOURCES, WANTED
from deploy.ray.node_actor import hire
from deploy.ray.private import tokens
from deploy.runtime.many import ManyNodes
from deploy.runtime.node_client import ANSWER_S, NodeClient
from deploy.runtime.protocol import Observed
from epd_serve.errors import ConfigError, EpdError
from epd_serve.key_files import derived_key

FACTS, NONCE, MASTER, INSTANCES, BACK = "nodes.json", "nonce", "master.json", "instances.json", "back.json"
"""Notes of what each node was before anything of ours ran there, of what makes the key of this deployment another one
than that of the last, of the feature store's master, of what ran last, and of nodes that came when some had been asked
for: they may go with the load, and have no front doors unless every node has."""

LEFT_OUT = "left-out.json"
"""A note of nodes that cannot be used: the next controller does not begin with them."""

LOOK_S = 1.0
UNUSED_S = 10.0
"""For so long a node is kept on which nothing is leased: what is given back may be leased again at once."""

START_S, ASK_S, END_S = 120.0, 5.0, 60.0
"""For an actor to start and to do what takes long, to answer, and to end its node."""

logger = logging.getLogger(__name__)


class Master(msgspec.Struct, frozen=True):
    """Of the feature store's second tier: the node that runs it, and its `host:port`, or "" where there is none."""

    node: str = ""
    address: str = ""


class Nodes:
    """Args:
        begun_on: the node of whoever began the deployment.
        epoch: of the controller, above that of those before it.
        say: takes a line for the operator.

    Attributes:
        key: of the deployment: whoever has it is one of its processes. It follows from the cluster's token, so that no
            secret lies in the notes, and every controller finds the same.
        many: runs the instances.
        left_out: nodes that cannot be part of it.
    """

    def __init__(
        self, config: DeployConfig, begun_on: str, notes: State, epoch: int, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._begun_on = begun_on
        self._notes = notes
        self._epoch = epoch
        self._say = say
        noted = msgspec.json.decode(notes.read(FACTS) or b"[]", type=list[NodeFacts])
        self._known = {one.machine.id: one for one in noted}
        self._there: dict[str, RayNode] = {}
        self._actors: dict[str, Actor] = {}
        self._used_s: dict[str, float] = {}  # of nodes with a process of ours: when something was leased there last
        self._back = msgspec.json.decode(notes.read(BACK) or b"[]", type=set[str])
        self._one_at_a_time = asyncio.Lock()
        self.left_out = msgspec.json.decode(notes.read(LEFT_OUT) or b"[]", type=set[str])
        self._warned: set[str] = set()
        self._master = msgspec.json.decode(notes.read(MASTER) or b"{}", type=Master)
        self._resource = ""
        if (nonce := notes.read(NONCE)) is None:
            nonce = secrets.token_hex(16).encode()
            notes.write(NONCE, nonce)
        if not (token := tokens.get_raw_token()):
            raise ConfigError("Ray has no token here: start it with RAY_AUTH_MODE=token set on every node")
        self.key = derived_key(token, f"epd-serve/deployment-key/1/{config.name}/{nonce.decode()}").hex()
        self._deployment: Deployment | None = None
        self._doors: AllDoors | None = None
        self._key_actor: Actor | None = None
        remembered = msgspec.json.decode(notes.read(INSTANCES) or b"[]", type=tuple[Observed, ...])
        self._remembered = {one.order.spec.node for one in remembered}
        self.many = ManyNodes(say, remembered)

    async def gather(self) -> Machines:
        """Those that there are, as they were before anything of ours ran on them.

        Raises:
            ConfigError: none has devices of the kind that is wanted, or they differ in what may not differ.
            EpdError: one does not say what it is.
        """
        there = [one for one in await asyncio.to_thread(nodes_alive) if one.id not in self.left_out]
        self._resource = RESOURCES[self._kind(there)]
        fitting = [one for one in there if one.resources.get(self._resource, 0) >= 1]
        if not fitting:
            told = "; ".join(f"{one.address} has {_resources(one)}" for one in there)
            raise ConfigError(f"no node of the Ray cluster has a {self._resource}: {told}", param="--device")
        if self._config.fronts == "here" and all(one.id != self._begun_on for one in fitting):
            raise ConfigError(
                f"--fronts here: this node has no {self._resource}, and front doors are on nodes that have; take every",
                param="--fronts",
            )
        await asyncio.gather(*(self._meet(one) for one in fitting))
        return self.machines

    @property
    def machines(self) -> Machines:
        return Machines.of(self._known[node].machine for node in self._there)

    async def _meet(self, node: RayNode) -> None:
        """Raises ConfigError where it is not as the others are, EpdError where it does not say what it is."""
        actor = await self._hired(node.id)
        if node.id not in self._known:
            lent = int(node.resources.get(self._resource, 0))
            facts = await _asked(actor.facts.remote(self._config, lent), START_S, f"node {node.address}")
            for other in self._known.values():
                if differing := differences(facts, other):
                    raise ConfigError(
                        f"the nodes of a deployment have to agree: {'; '.join(differing)}", param="--runtime"
                    )
            self._known[node.id] = facts
            self._notes.write(FACTS, msgspec.json.encode(list(self._known.values())))
        self._actors[node.id], self._there[node.id] = actor, node

    async def _hired(self, node: str) -> Actor:
        """The actor of this node. In a thread, since Ray asks the cluster's head for it, which may be away."""
        return await asyncio.to_thread(hire, self._config.name, node, self._config.run_root)

    def _kind(self, there: Iterable[RayNode]) -> str:
        config = self._config
        if config.engine == "sim":
            return "cpu"
        if config.device != "auto":
            return config.device
        return next((kind for kind in ("npu", "cuda") if any(RESOURCES[kind] in one.resources for one in there)), "cpu")

    # --- how they are spoken to -----------------------------------------------------------------------------------

    async def open(self, deployment: Deployment, doors: AllDoors) -> None:
        """Has the node process run on each, with front doors where they are wanted.

        Raises:
            ConfigError: an address of front doors is taken. EpdError: a node process does not start.
        """
        self._deployment, self._doors = deployment, doors
        config = self._config
        fronts = [node for node in self._there if self._has_front(node)]
        await asyncio.gather(*(self._call(node, "bind", config.host, config.port, wait_s=START_S) for node in fronts))
        if not self._master.node:
            await self._choose_master()
        await asyncio.gather(*(self._ensure(node) for node in self._there))
        for node in self._remembered - self._there.keys():  # they have ended while nobody looked
            self.many.lose(node)
        for node in self._there:
            self._join(node)

    async def _choose_master(self) -> None:
        """The first node runs the master of the feature store's second tier, if there is one; the others are told."""
        first = min(self._there)
        run = await self._ensure(first)
        self._master = Master(first, run.master)
        self._notes.write(MASTER, msgspec.json.encode(self._master))

    def _join(self, node: str) -> None:
        assert self._doors is not None, "open() has been called"
        self._used_s[node] = time.monotonic()
        transport = ThroughActor(partial(self._ask, node))
        self.many.join(node, NodeClient(transport, self._epoch))
        if self._has_front(node):
            self._doors.join(node, RemoteDoors(transport, self._epoch))

    async def _ask(self, node: str, *request: Any) -> HttpAnswer | None:
        """As `NodeActor.ask`; has the node process run where it does not. Raises EpdError."""
        answer: HttpAnswer | None = await self._call(node, "ask", *request, wait_s=ANSWER_S + ASK_S)
        if answer is None:
            await self._ensure(node)
        return answer

    async def _ensure(self, node: str) -> NodeRun:
        run: NodeRun = await self._call(node, "ensure", self._setup(node), wait_s=START_S)
        for warning in run.warnings:
            self._warn(f"{self._called(node)}: {warning}")
        return run

    def _warn(self, text: str) -> None:
        """Once."""
        if text not in self._warned:
            self._warned.add(text)
            self._say(f"warning: {text}")

    def _setup(self, node: str) -> NodeSetup:
        assert self._deployment is not None, "open() has been called"
        config, options = self._config, front_options(self._notes)
        return NodeSetup(
            deployment=config.name,
            node=node,
            host=config.node_host or self._there[node].address,
            key=self.key,
            ports=port_range(config.node_ports),
            master="" if node == self._master.node else self._master.address,
            blueprint=replace(self._deployment.blueprint, machines=self.machines).at(node),
            front=self._deployment.settings(options) if self._has_front(node) else None,
            run_root=config.run_root,
        )

    def _has_front(self, node: str) -> bool:
        if self._config.fronts == "here":
            return node == self._begun_on
        return self._config.fronts == "every" or node not in self._back

    def _called(self, node: str) -> str:
        return f"node {self._there[node].address} ({short_node(node)})"

    async def _call(self, node: str, method: str, *values: Any, wait_s: float = ASK_S) -> Any:
        """What its actor answers. Raises EpdError: it is none of the deployment, or does not answer."""
        actor = self._actors.get(node)
        if actor is None:
            raise EpdError(f"node {node} has gone")
        return await _asked(getattr(actor, method).remote(*values), wait_s, self._called(node))

    # --- that they come and go ------------------------------------------------------------------------------------

    async def follow(self, aim: Aim) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                alive = await asyncio.to_thread(nodes_alive)
            except (RayError, RuntimeError) as error:  # its head is away
                logger.warning("Ray does not say which nodes there are: %s", error)
                continue
            for node in self._there.keys() - {one.id for one in alive}:
                self._lose(node, aim)
            for one in alive:
                fits = one.resources.get(self._resource, 0) >= 1
                if fits and one.id not in self._there and one.id not in self.left_out:
                    await self._welcome(one, aim)

    def _lose(self, node: str, aim: Aim) -> None:
        assert self._doors is not None, "open() has been called"
        self._say(f"{self._called(node)} has gone")
        self.many.lose(node)
        self._doors.lose(node)
        if node == self._master.node and self._master.address:
            self._warn("the feature store's second tier has gone with it: features are computed again until a restart")
        self._used_s.pop(node, None)
        if (actor := self._actors.pop(node, None)) is not None:
            ray.kill(actor)
        del self._there[node]
        if self._there:
            aim.machines = self.machines

    async def run_on(self, nodes: Collection[str]) -> None:
        """Have a node process run on each of these nodes that is a part of the deployment, and end that of a node that
        has been none of them for a while, unless front doors or the master of the second tier are there.

        Raises:
            EpdError: a node does not answer, or its node process does not start.
        """
        async with self._one_at_a_time:
            for node in [self._there[one] for one in (self._there.keys() & nodes) - self._used_s.keys()]:
                await self._meet(node)
                await self._ensure(node.id)
                self._join(node.id)
            now = time.monotonic()
            self._used_s |= dict.fromkeys(self._used_s.keys() & nodes, now)
            kept = {self._master.node} if self._master.address else set()
            for one, used_s in self._used_s.items():
                if now - used_s > UNUSED_S and one not in kept and not self._has_front(one):
                    await self._leave(one)
                    break  # others at the next call

    async def _leave(self, node: str) -> None:
        self.many.rest(node)
        del self._used_s[node]
        actor = self._actors.pop(node)
        try:
            await _asked(actor.end.remote(), END_S, self._called(node))
        except EpdError as error:
            logger.warning("%s", error)
        ray.kill(actor)

    async def _welcome(self, node: RayNode, aim: Aim) -> None:
        if self._notes.read(WANTED) is not None:
            self._back.add(node.id)
            self._notes.write(BACK, msgspec.json.encode(self._back))
        async with self._one_at_a_time:
            try:
                await self._meet(node)
                await self._ensure(node.id)
            except EpdError as error:
                self._say(f"node {node.address} is left out: {error}")
                await self._leave_out(node.id)
                return
            self._join(node.id)
        if self._there:
            aim.machines = self.machines
        self._say(f"{self._called(node.id)} has come")

    async def _leave_out(self, node: str) -> None:
        """For good. Its node process does not run, and an actor would keep Ray's autoscaler from taking it away."""
        self.left_out.add(node)
        self._notes.write(LEFT_OUT, msgspec.json.encode(self.left_out))
        self._there.pop(node, None)
        self._actors.pop(node, None)
        ray.kill(await self._hired(node))

    async def part(self) -> None:
        """Nobody is asked anything any more; what runs goes on."""
        self._actors.clear()
        await self.many.disconnect()

    async def parts(self) -> dict[str, int]:
        """Pids of processes that are no stages, by node and name."""
        nodes = tuple(self._actors)
        told = await asyncio.gather(*(self._call(node, "parts") for node in nodes), return_exceptions=True)
        return {
            f"{node}/{name}": pid
            for node, parts in zip(nodes, told, strict=True)
            if not isinstance(parts, BaseException)
            for name, pid in parts.items()
        }

    async def api_keys(self, path: str) -> str:
        """The text of the clients' keys, on the node of whoever began the deployment. Raises EpdError."""
        if self._key_actor is None:  # there may be no other part of the deployment
            self._key_actor = await self._hired(self._begun_on)
        text: str = await _asked(self._key_actor.api_keys.remote(path), ASK_S, f"node {short_node(self._begun_on)}")
        return text

    async def log(self, node: str, name: str, last_bytes: int) -> str:
        """The end of a log, or "" where nobody has it."""
        with contextlib.suppress(EpdError):
            data, _ = await self._call(node, "log", name, -last_bytes)
            return str(data.decode(errors="replace"))
        return ""


class ThroughActor(httpx.AsyncBaseTransport):
    """HTTP to a node by way of its actor."""

    def __init__(self, ask: Callable[..., Awaitable[HttpAnswer | None]]) -> None:
        self._ask = ask

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            answer = await self._ask(*question_of(request), await request.aread())
        except EpdError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        if answer is None:
            raise httpx.ConnectError("nobody answers there", request=request)
        status, told, content = answer
        return httpx.Response(status, headers=told, content=content, request=request)


async def end_nodes(deployment: str) -> None:
    """Every node process of the deployment, and the actors that have them."""
    ending = []
    for node in await asyncio.to_thread(nodes_alive):
        with contextlib.suppress(ValueError):  # no part of it
            actor = await asyncio.to_thread(ray.get_actor, node_name(deployment, node.id), namespace=NAMESPACE)
            ending.append((actor, asyncio.ensure_future(_asked(actor.end.remote(), END_S, f"node {node.address}"))))
    for actor, ended in ending:
        try:
            await ended
        except EpdError as error:
            logger.warning("%s", error)
        ray.kill(actor)


async def _asked(answer: Awaitable[Any], wait_s: float, who: str) -> Any:
    """Raises EpdError: no answer, or what was refused there."""
    try:
        async with asyncio.timeout(wait_s):
            return await answer
    except TimeoutError:
        raise EpdError(f"{who} has not answered for {wait_s:g} s") from None
    except RayError as error:
        cause = getattr(error, "cause", None)
        raise (cause if isinstance(cause, EpdError) else EpdError(f"{who} does not answer: {error}")) from error


def _resources(node: RayNode) -> str:
    shown = (f"{count:g} {name}" for name, count in node.resources.items() if name in RESOURCES.values())
    return ", ".join(shown) or "no devices"
