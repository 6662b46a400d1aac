"""The Controller actor: the one controller of a deployment, on whichever node, started again by Ray when it dies.

What a life of a controller is, `deploy/launch/life.py` says; here it gets nodes that come and go (`nodes.py`), devices
that Ray reserves (`leases.py`), notes in the cluster's head (`notes.py`), and operators who ask through the actor.
Stages and front doors go on without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import ray

from deploy.agent.waits import Patience
from deploy.control.aim import Aim
from deploy.front.all_doors import AllDoors
from deploy.front.key_watch import Read
from deploy.launch.admin import open_admin, serve_page
from deploy.launch.life import API_KEYS, GRACE_S, READY, Deployment, Life, noted_keys
from deploy.launch.ready_message import ready_message
from deploy.memory.plan import memory_table
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.ray.cluster import Headers, HttpAnswer, asked_of
from deploy.ray.leases import RayLeases, release_all
from deploy.ray.news import Event, News
from deploy.ray.nodes import INSTANCES, Nodes, end_nodes
from deploy.ray.notes import GcsNotes
from epd_serve import __version__
from epd_serve.errors import ConfigError, EpdError, StageError

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

ASKED, SIGNALS, OVER = "asked.json", "signals.json", "over"
"""Notes of what was asked for, of what operators have sent since, and of the exit code that all ends with."""

BEGIN_S = 60.0
"""Whoever makes this actor may be killed before it says what for."""

CRASHED = 70
CRASH_S = 1.0
"""From a defect to the end of the process: Ray starts the next one at once."""

HEARD_S = 3.0
LOG_TAIL_BYTES = 4096

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """`node`: of whoever asked for it. `api_keys`: the text of the clients' keys there, or ""."""

    config: DeployConfig
    node: str
    api_keys: str = field(default="", repr=False)


class ControllerActor:
    """Args:
    name: of the deployment.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: asyncio.Future[Asked] = asyncio.get_running_loop().create_future()
        self._began = time.monotonic()
        self._notes = GcsNotes(name)
        self._loading = asyncio.create_task(self._notes.load(), name="notes")
        self._news = News()
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._take: Callable[[int], None] = lambda number: None
        self._app: asyncio.Future[FastAPI] = asyncio.get_running_loop().create_future()
        self._code: int | None = None
        self._nodes: Nodes | None = None
        self._over = asyncio.Event()
        self._living = asyncio.create_task(self._live(), name="controller")

    # --- what operators ask ---------------------------------------------------------------------------------------

    async def begin(self, asked: Asked) -> None:
        """For once, by whoever has made this actor. Not by its arguments: Ray shows those to many.

        Args:
            asked: what its config names of files has to be on every node, but for the clients' keys.
        """
        if not self._asked.done():
            self._asked.set_result(asked)

    async def version(self) -> str:
        return __version__

    async def ask(self, method: str, path: str, headers: Headers, content: bytes) -> HttpAnswer:
        """An HTTP request to the admin application, as soon as there is one."""
        transport = httpx.ASGITransport(await asyncio.shield(self._app))
        async with httpx.AsyncClient(transport=transport, base_url="http://deployment") as http:
            return await asked_of(http, method, path, headers, content)

    async def news(self, life: str, number: int, wait_s: float) -> tuple[str, int, list[Event]]:
        """As `News.after`."""
        return await self._news.after(life, number, wait_s)

    async def signal(self, number: int) -> None:
        """As to the process of a launch."""
        await asyncio.shield(self._loading)
        self._notes.write(SIGNALS, msgspec.json.encode([*self._signals_noted(), number]))
        self._hear(number)

    def _hear(self, number: int) -> None:
        self._signals.append(number)
        self._signalled.set()
        self._take(number)

    def _signals_noted(self) -> list[int]:
        return msgspec.json.decode(self._notes.read(SIGNALS) or b"[]", type=list[int])

    # --- what its life asks of it: `deploy.launch.life.Process` -----------------------------------------------------

    def heed(self, take: Callable[[int], None]) -> None:
        self._take = take
        for number in self._signals:
            take(number)

    async def over(self, code: int) -> None:
        """Noted first: what is left is then ended by whichever life."""
        if self._code is None:
            self._code = code
            self._notes.write(OVER, str(code).encode())
            await self._notes.kept()
            self._over.set()

    def answers(self, app: FastAPI) -> None:
        """Operators are answered by it from now on."""
        self._app.set_result(app)

    # --- its life -------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Until the deployment is over, and nothing of it is left."""
        try:
            await self._loading
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                await self._clear()  # somebody may have killed one of this name
                async with asyncio.timeout(BEGIN_S):
                    asked = await self._asked
                self._notes.write(API_KEYS, asked.api_keys.encode())
                self._notes.write(ASKED, msgspec.json.encode(asked))
                await self._notes.kept()
                await self._until_over(asked)
            elif (noted := self._notes.read(ASKED)) is not None and self._notes.read(OVER) is None:
                for number in self._signals_noted():
                    self._hear(number)
                await self._until_over(msgspec.json.decode(noted, type=Asked))
            await self._clear()
            self._news.add("ended", self._code or 0)
            await self._news.taken(HEARD_S)
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
            await asyncio.sleep(HEARD_S)
        except BaseException:  # not by unwinding: Ray would take an actor for well that does nothing any more
            logger.exception("the controller has failed")
        await asyncio.sleep(CRASH_S)
        os._exit(CRASHED)

    async def _clear(self) -> None:
        """Nothing of it is left on the cluster but this actor."""
        await end_nodes(self._name)
        await release_all(self._name)
        await self._notes.forget()

    async def _until_over(self, asked: Asked) -> None:
        was_ready = self._notes.read(READY) is not None
        preparing = asyncio.create_task(self._prepared(asked.config, asked.node))
        stopped = asyncio.create_task(self._signalled.wait())
        tasks: list[asyncio.Task[Any]] = [preparing, stopped]
        try:
            waited = (preparing,) if was_ready else (preparing, stopped)
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not preparing.done():
                return await self.over(0)
            try:
                life = preparing.result()
            except EpdError as error:
                if was_ready:
                    raise
                self._news.add("refused", str(error), error.param, isinstance(error, ConfigError))
                return await self.over(1)
            living = [
                asyncio.create_task(self._over.wait()),
                asyncio.create_task(life.run(), name="life"),
                asyncio.create_task(life.nodes.follow(life.aim), name="nodes"),
                asyncio.create_task(self._remember(life), name="memory"),
                asyncio.create_task(_superseded(life), name="rival"),
            ]
            tasks += living
            done, _ = await asyncio.wait(living, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if self._nodes is not None:
                await self._nodes.part()

    async def _prepared(self, config: DeployConfig, begun_on: str) -> RayLife:
        """The nodes as they are, the deployment drawn for them, and a process of ours on each."""
        notes = self._notes
        epoch = await asyncio.to_thread(notes.next_epoch)
        nodes = self._nodes = Nodes(config, begun_on, notes, epoch, self._news.line)
        machines = await nodes.gather()
        leases = RayLeases(config.name, machines.kind, config.placement, notes, nodes.run_on, nodes.left_out)
        await leases.tidy()
        blueprint = await asyncio.to_thread(draw, config, machines=machines)
        deployment = Deployment(
            config.name,
            blueprint,
            Patience(),
            api_keys=noted_keys(notes, config.api_key_file),
        )
        doors = AllDoors(say=self._news.line, key_file=_key_file(nodes.key), goes_on=notes.read(READY) is not None)
        await nodes.open(deployment, doors)
        return RayLife(self, nodes, deployment, doors, notes, self._news, Aim(blueprint, leases), self._began)

    async def _remember(self, life: RayLife) -> None:
        """What runs, for a life that begins while a node is silent."""
        async for instances in life.nodes.many.watch():
            self._notes.write(INSTANCES, msgspec.json.encode(instances))


class RayLife(Life):
    """On many nodes."""

    def __init__(
        self,
        actor: ControllerActor,
        nodes: Nodes,
        deployment: Deployment,
        doors: AllDoors,
        notes: GcsNotes,
        news: News,
        aim: Aim,
        began: float,
    ) -> None:
        super().__init__(deployment, nodes.many, doors, notes, actor, news, aim)
        self.nodes = nodes
        self.superseded = nodes.many.superseded, doors.superseded
        self._actor = actor
        self._news = news
        self._began = began

    def introduce(self) -> None:
        memory = self.blueprint.memory
        if memory is not None and memory.shared_devices:
            self.screen.line(f"memory of the devices:\n{memory_table(memory)}")

    def key_file(self, path: str) -> Read:
        """On the node where the deployment was asked for."""
        return partial(self.nodes.api_keys, path)

    async def answer(self, routes: APIRouter) -> None:
        from proxy.http.admin import create_admin

        self._actor.answers(create_admin(self.doors.table, self.doors.metrics, trusted=True, more=[routes]))
        config = self.blueprint.config
        with open_admin(config.admin_host, config.admin_port, config.admin_key_file) as admin:
            if admin is not None:
                await serve_page(admin, self.doors, config, grace_s=GRACE_S, more=[routes])
            await asyncio.get_running_loop().create_future()  # until cancelled

    async def announce(self) -> None:
        seconds = time.monotonic() - self._began
        config = self.blueprint.config
        logs = f"epd-serve logs --ray --name {config.name}"
        self._news.add("ready", ready_message(self.aim.drawn, logs, self.news.instances(), seconds, ends=""))

    async def explain(self, error: EpdError) -> str:
        """With the end of the log of the stage that is to blame: it goes with its node process."""
        if isinstance(error, StageError) and (one := self.news.seen.get(error.stage)) is not None:
            tail = await self.nodes.log(one.order.spec.node, error.stage, LOG_TAIL_BYTES)
            return f"{error}; the end of its log:\n{tail}"
        return str(error)

    async def own_parts(self) -> dict[str, int]:
        return {"controller": os.getpid(), **await self.nodes.parts()}


async def _superseded(life: RayLife) -> None:
    """Raises EpdError: Ray has taken this one for dead, and there is another."""
    waits = [asyncio.create_task(one.wait()) for one in life.superseded]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    raise EpdError("another controller has this deployment")


def _key_file(key: str) -> str:
    """A file that this process alone can read, and that goes with it."""
    descriptor = os.memfd_create("key")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, key.encode())
    return f"/proc/self/fd/{descriptor}"
