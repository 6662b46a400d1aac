"""One life of whoever controls a deployment, on one machine or on many: from the first order to the end of all.

It may die: stages and front doors go on meanwhile, and the next life takes in what there is (the notes, the first word
of the runtime) before it says anything to anybody. It decides when the deployment is over, and ends front doors and
stages gracefully before it says so; a defect of its own ends nothing.

What differs from machine to machines is said by `launcher.py` here and by `deploy/cluster/controller.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from deploy.agent.waits import Patience
from deploy.change.types import Wanted
from deploy.control.aim import Aim
from deploy.control.changes import Deadlines, Journal
from deploy.control.controller import Controller
from deploy.control.metrics import ControlMetrics
from deploy.control.reconciler import Reconciler
from deploy.follow.switch import Switch
from deploy.front.key_watch import KeyMetrics, KeyWatch, Read, api_keys_of, of_this_machine, read_key_text
from deploy.host.ending import Ending
from deploy.host.event_loop import together
from deploy.host.state import State
from deploy.launch.screen import Shown, StageNews
from deploy.options.config import proxy_values
from deploy.plan.blueprint import Blueprint
from deploy.plan.proxy_settings import build_proxy_settings
from deploy.runtime.protocol import Order, Spec
from epd_serve.errors import ConfigError, EpdError
from proxy.config.tree import changed

if TYPE_CHECKING:
    from fastapi import APIRouter

    from deploy.agent.agent import Agent
    from deploy.follow.live import Follower
    from deploy.front.all_doors import AllDoors
    from deploy.front.doors import FrontDoors
    from deploy.runtime.many import ManyNodes
    from proxy.config.keys import ApiKeys
    from proxy.config.settings import ProxySettings

    Fronts = FrontDoors | AllDoors
    Host = Agent | ManyNodes

GRACE_S = 2.0
"""How long requests in flight may go on when all is taken down; with the stages' 8 s the end is below 15 s away."""

CLOSE_S, PARTS_S = 12.0, 1.0
"""How long front doors may take to end, and then the runtime to end the stages; and to say what runs."""

READY, OPTIONS, API_KEYS, ENDING = "ready", "front-options.json", "api-keys.json", "ending"
"""Notes that say that the deployment has been ready, what front doors go by beside its `--proxy`, the text of the
clients' keys that they go by, empty where nobody needs one, which is written before anything begins; and that all is
being taken down, with which exit code."""

KILLED = 130
"""The exit code after a second Ctrl-C."""


class Process(Protocol):
    """The process that a controller is: what it hears, and what it says of itself."""

    def heed(self, take: Callable[[int], None]) -> None:
        """Have the operator's signals taken, at once and ever after: also what an earlier life was told."""

    async def over(self, code: int) -> None:
        """All that is left is to be killed, and the deployment to end with this exit code."""


@dataclass(frozen=True)
class Deployment:
    """What every life of its controller is told.

    Attributes:
        id: of the launch. arena: where the features of a host's stages lie, or come to lie; None where none is shared
            with its front doors.
        api_keys: those of clients, as the life before this one knew them.
    """

    id: str
    blueprint: Blueprint
    patience: Patience
    arena: Path | None = None
    api_keys: ApiKeys | None = None

    def settings(self, options: Sequence[str] = ()) -> ProxySettings:
        """Of its front doors, with these `--proxy` options beside its own. Raises ConfigError."""
        config = self.blueprint.config
        config = changed(config, proxy_values(options))
        return build_proxy_settings(replace(self.blueprint, config=config), self.arena, self.api_keys)


def front_options(notes: State) -> tuple[str, ...]:
    """What front doors go by beside the `--proxy` of the launch."""
    return msgspec.json.decode(notes.read(OPTIONS) or b"[]", type=tuple[str, ...])


def checked_keys(path: str) -> str:
    """The text of the clients' keys, for the note; "" where there is no file. Raises ConfigError."""
    text = read_key_text(path) if path else ""
    if path:
        api_keys_of(text, path)
    return text


def noted_keys(notes: State, path: str) -> ApiKeys | None:
    """The clients' keys by which front doors go."""
    return api_keys_of((notes.read(API_KEYS) or b"").decode(), path) if path else None


class Life(ABC):
    """Args:
        notes: of the lives before it.

    Attributes:
        ready: the deployment has been ready, in this life or before it.
        restarts: of those of its processes whose lives are counted, by name.
    """

    def __init__(
        self, deployment: Deployment, host: Host, doors: Fronts, notes: State, process: Process, screen: Shown, aim: Aim
    ) -> None:
        self.deployment = deployment
        self.blueprint = deployment.blueprint
        self.host = host
        self.doors = doors
        self.notes = notes
        self.process = process
        self.screen = screen
        self.aim = aim
        self.ready = notes.read(READY) is not None
        self.first: tuple[Order, ...] = ()
        self.news = StageNews(screen, ())
        self.restarts: Mapping[str, int] = {}
        config = self.blueprint.config
        self.ending = Ending(config.lame_duck_s, config.drain_s, screen.line, self._kill)
        self.ending.serves(doors)

    @abstractmethod
    def introduce(self) -> None:
        """Say what is to be known before anything starts."""

    @abstractmethod
    async def answer(self, routes: APIRouter) -> None:
        """Answer those who run the deployment, until cancelled."""

    @abstractmethod
    async def announce(self) -> None:
        """It is ready for the first time."""

    @abstractmethod
    async def explain(self, error: EpdError) -> str:
        """Why it has not become ready, for the operator."""

    @abstractmethod
    async def own_parts(self) -> dict[str, int]:
        """Pids of the processes that are no stages, beside front doors and what stages share, by name."""

    def key_file(self, path: str) -> Read:
        """What reads the file of the clients' keys."""
        return of_this_machine(path)

    async def run(self) -> int:
        """Until the deployment is over. Returns its exit code, which the process has been told, too."""
        if (noted := self.notes.read(ENDING)) is not None:  # what is left has had its time
            await self.process.over(int(noted))
            return int(noted)
        self.process.heed(self.ending.take)
        fronts = asyncio.create_task(self.doors.serve(), name="front doors")
        tasks = [fronts]  # a life that is cancelled leaves nobody behind who goes on
        code = 0
        try:
            if not self.ready:
                self.introduce()
                for warning in self.blueprint.warnings:
                    self.screen.line(f"warning: {warning}")
            control = asyncio.create_task(self._control(), name="control")
            tasks.append(control)
            try:
                await self._until_stopped(control, fronts)
            except EpdError as error:
                if self.ready:
                    raise
                code = 1
                self.screen.close()
                self.screen.line(f"epd-serve: {await self.explain(error)}")
            self.notes.write(ENDING, str(code).encode())
            await self.notes.kept()
            await self._take_down(control)
            await self.process.over(code)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return code

    async def _control(self) -> None:
        """Have the stages be what is wanted, and answer those who run the deployment."""
        reconciler = await self._reconciler()
        if not self.ready:
            self.first = tuple(Order(_id(spec), spec) for spec in reconciler.wanted.specs)
            self.news = StageNews(self.screen, [order.id for order in self.first])
            self.screen.open([order.id for order in self.first])
        following = Switch(self.blueprint.config.follow, self.notes)
        controller = Controller(
            self.deployment.id, reconciler, self.doors, self.aim, self._parts, self._configure, following, self.restarts
        )
        try:
            await following.begin(partial(self._follower, controller, reconciler))
        except ConfigError as error:
            if not self.ready:
                raise
            self.screen.line(f"the load is not followed any more: {error}")
        for order in self.first:
            await self.host.start(order)
        self.doors.registry.register(ControlMetrics(reconciler))
        self.doors.deployment = controller.status
        await together(
            self.news.follow(self.host),
            reconciler.run(),
            controller.keep_places(),
            self._answer(controller),
            following.run(),
            self._say_ready(reconciler),
            self._watch_keys(),
        )

    def _follower(self, controller: Controller, reconciler: Reconciler) -> Follower:
        """Raises ConfigError."""
        from deploy.follow.compose import follower_of  # loads the planner

        doors = self.doors
        return follower_of(self.blueprint, controller, reconciler, doors.table, doors.look, doors.registry)

    async def _watch_keys(self) -> None:
        """Have front doors go by the clients' keys as their file has them."""
        path = self.blueprint.config.api_key_file
        if not path:
            return
        text = (self.notes.read(API_KEYS) or b"").decode()

        def tell(keys: ApiKeys, text: str) -> None:
            self.notes.write(API_KEYS, text.encode())
            self.doors.go_by(keys)

        self.doors.go_by(api_keys_of(text, path))
        metrics = KeyMetrics(self.doors.registry)
        await KeyWatch(path, text, self.key_file(path), tell, self.screen.line, metrics).run()

    async def _reconciler(self) -> Reconciler:
        """After a life before this one: with what it wanted, beside what runs."""
        config = self.blueprint.config
        journal = Journal(self.notes)
        record = journal.read() if self.ready else None
        previous = None
        if record is None:
            wanted = await self._first_wanted()
        else:
            running, share = await self._running(), record.core_share
            wanted = await self.aim.again(record.layouts[-1], running, core_share=share)
            if record.change is not None and not record.change.state.over:
                previous = await self.aim.again(record.change.before, running, core_share=share)
        return Reconciler(
            self.host,
            self.doors,
            journal,
            wanted,
            deadlines=Deadlines(config.startup_timeout_s, config.drain_s, self.deployment.patience.stop_grace_s),
            say=self.screen.line,
            record=record,
            previous=previous,
        )

    async def _first_wanted(self) -> Wanted:
        """Raises LeaseError: there are no devices for it."""
        if self.aim.leases is None:
            return self.aim.first()
        layout = str(self.blueprint.layout)
        if await self.aim.leases.places():  # a life before this one has got as far as that
            return await self.aim.again(layout, await self._running())
        return await self.aim(layout, ())

    async def _running(self) -> list[Spec]:
        return [one.order.spec for one in await anext(self.host.watch())]

    async def _answer(self, controller: Controller) -> None:
        routes = await asyncio.to_thread(_routes)  # the web framework loads while others go on
        await self.answer(routes(controller, self.doors))

    async def _configure(self, options: Sequence[str]) -> None:
        """Noted before anybody goes by it, so that the next life does."""
        every = (*front_options(self.notes), *options)
        settings = self.deployment.settings(every)
        self.notes.write(OPTIONS, msgspec.json.encode(every))
        await self.notes.kept()
        await self.doors.configure(settings)

    async def _parts(self) -> dict[str, int]:
        """Pids of the processes that are no stages; without those of a host that does not say so in time."""
        groups: Mapping[str, int] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PARTS_S):
                groups = await self.host.groups()
        shared = {name: pid for name, pid in groups.items() if name.rpartition("/")[2] not in self.news.seen}
        return {**await self.own_parts(), **shared, **self.doors.pids}

    async def _say_ready(self, reconciler: Reconciler) -> None:
        """Once every stage has answered, none waits for its KV links, and the front doors know."""
        await self.news.all_up.wait()
        if not self.ready:
            await reconciler.changes.over()
        table = self.doors.table
        while not self.ready and (
            len(table.snapshot()) < len(self.first) or not all(view.up for view in table.snapshot())
        ):
            await table.changed(1.0)
        await self.doors.ready()
        if not self.ready:
            self.ready = True
            self.notes.write(READY, b"")
            await self.notes.kept()
            self.screen.close()
            await self.announce()

    async def _until_stopped(self, *parts: asyncio.Task[None]) -> None:
        """Show progress, and wait. Returns on a signal, raises what ended a part."""
        stopped = asyncio.create_task(self.ending.wait())
        try:
            while not (stopped.done() or any(part.done() for part in parts)):
                await asyncio.wait(
                    (stopped, *parts), return_when=asyncio.FIRST_COMPLETED, timeout=None if self.ready else 1.0
                )
                if not self.ready:
                    self.screen.tick()
        finally:
            stopped.cancel()
        for part in parts:
            if part.done() and not self.ending.stopping.is_set():
                part.result()  # raises what ended it
                raise EpdError(f"the {part.get_name()} ended unexpectedly")

    async def _take_down(self, control: asyncio.Task[None]) -> None:
        """First nobody changes anything any more, then no new requests, then the stages."""
        self.screen.close()
        if self.ending.stopping.is_set():
            self.screen.line("stopping")
        control.cancel()
        await asyncio.wait([control])
        for end in (self.doors.end, self.host.close):
            with contextlib.suppress(TimeoutError):  # what is left then is killed
                async with asyncio.timeout(CLOSE_S):
                    await end()

    def _kill(self) -> None:
        """No more waiting."""
        self._killing = asyncio.create_task(self.process.over(KILLED))


def _routes() -> Callable[[Controller, Fronts], APIRouter]:
    """Loads the web framework: for a thread."""
    from fastapi import APIRouter

    import proxy.http.admin  # noqa: F401
    from deploy.control.routes import control_routes
    from deploy.front.trace_routes import trace_routes
    from proxy.http.admin import request_routes

    def routes(controller: Controller, doors: Fronts) -> APIRouter:
        both = APIRouter()
        both.include_router(control_routes(controller))
        both.include_router(request_routes(doors.look))
        both.include_router(trace_routes(doors.traced))
        return both

    return routes


def _id(spec: Spec) -> str:
    """The name that it has in its layout."""
    assert spec.plan is not None, "specs() says its place"
    return spec.plan.id
