"""The controller of one launch: what an operator wants of it, its front doors, its listeners, its screen, its end.

A process of its own, which may die: stages and front doors go on meanwhile, and the next life takes in what there is
(the keeper's entries, the first word of the runtime, the journal) before it says anything to anybody. It decides when
the launch is over, and ends front doors and stages gracefully before it says so; a defect of its own ends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from deploy.agent.specs import orders
from deploy.agent.wiring import STAGE_HOST
from deploy.control.aim import Aim
from deploy.control.controller import Controller, PartJson
from deploy.control.failure import Deadlines
from deploy.control.journal import Journal
from deploy.control.reconciler import Reconciler
from deploy.front.doors import FrontDoors
from deploy.host.ending import Ending
from deploy.host.event_loop import together
from deploy.host.listeners import exposure_warnings
from deploy.keeper.interface import Keeper
from deploy.launch.admin import Admin, serve_admin
from deploy.launch.control_setup import ControlSetup, Host
from deploy.launch.ready_message import ready_message
from deploy.launch.stage_news import StageNews
from deploy.memory.table import show_memory
from deploy.plan.proxy_settings import build_proxy_settings
from epd_serve.errors import EpdError, StageError

if TYPE_CHECKING:
    from fastapi import APIRouter

    from proxy.config.settings import ProxySettings

GRACE_S = 2.0
"""How long requests in flight may go on when all is taken down; with the stages' 8 s the end is below 15 s away."""

CLOSE_S, PARTS_S = 12.0, 1.0
"""How long the agent may take to end the stages, and to say what runs."""

READY, OPTIONS = "ready", "front options"
"""The keeper's entries that say that the launch has been ready, and what front doors go by beside its `--proxy`."""

KILLED = 130
"""The exit code after a second Ctrl-C."""


async def run_controller(setup: ControlSetup, keeper: Keeper, host: Host) -> int:
    """Until the launch is over. Returns its exit code, which the keeper has been told, too."""
    noted = {entry.name: entry.tag for entry in await keeper.entries()}
    options = msgspec.json.decode(noted.get(OPTIONS, b"[]"), type=tuple[str, ...])
    return await _Life(setup, keeper, host, was_ready=READY in noted, options=options).run()


class _Life:
    """One life of the controller.

    Attributes:
        ready: the launch has been ready, in this life or before it.
        options: of front doors, beside those of the launch.
    """

    def __init__(
        self, setup: ControlSetup, keeper: Keeper, host: Host, *, was_ready: bool, options: tuple[str, ...]
    ) -> None:
        self.setup = setup
        self.blueprint = setup.blueprint
        self.screen = setup.screen
        self.keeper = keeper
        self.host = host
        self.ready = was_ready
        self.options = options
        config = setup.blueprint.config
        self.aim = Aim(self.blueprint)
        self.doors = FrontDoors(
            self._settings(options),
            setup.shared,
            keeper,
            grace_s=GRACE_S,
            drain_s=config.drain_s,
            say=self.screen.line,
            launch_id=setup.run.launch_id,
            link_grace_s=setup.patience.links_s,
        )
        self.first = () if was_ready else orders(self.blueprint)
        self.news = StageNews(self.screen, [order.id for order in self.first])
        self.ending = Ending(config.lame_duck_s, config.drain_s, self.screen.line, self._kill)
        self.ending.serves(self.doors)

    async def run(self) -> int:
        heeding = asyncio.create_task(self.ending.heed(self.keeper.signals()))
        fronts = asyncio.create_task(self.doors.serve(), name="front doors")
        code = 0
        try:
            if not self.ready:
                self._introduce()
            control = asyncio.create_task(self._control(), name="control")
            try:
                await self._until_stopped(control, fronts)
            except EpdError as error:
                if self.ready:
                    raise
                code = 1
                self.screen.close()
                self.screen.line(f"epd-serve: {self._with_log(error)}")
            await self._take_down(control)
            await self.keeper.over(code)
        finally:
            for task in (fronts, heeding):
                task.cancel()
            await asyncio.wait([fronts, heeding])
        return code

    def _introduce(self) -> None:
        if self.blueprint.memory is not None:
            show_memory(self.blueprint.memory, self.setup.run.path, self.screen.line)
        for warning in self.blueprint.warnings:
            self.screen.line(f"warning: {warning}")
        self.screen.open([order.id for order in self.first])

    async def _control(self) -> None:
        """Have the stages be what is wanted, and answer those who run the launch."""
        reconciler = await self._reconciler()
        for order in self.first:
            await self.host.start(order)
        await together(
            self.news.follow(self.host), reconciler.run(), self._answer(reconciler), self._say_ready(reconciler)
        )

    async def _reconciler(self) -> Reconciler:
        """After a life before this one: with what it wanted, beside what runs."""
        config, patience = self.blueprint.config, self.setup.patience
        journal = Journal(self.setup.run.wanted)
        record = journal.read() if self.ready else None
        wanted, previous = self.aim.first(), None
        if record is not None:
            running = [one.order.spec for one in await anext(self.host.watch())]
            wanted = await self.aim.again(record.layouts[-1], running)
            if record.change is not None and not record.change.state.over:
                previous = await self.aim.again(record.change.before, running)
        return Reconciler(
            self.host,
            self.doors,
            journal,
            wanted,
            deadlines=Deadlines(config.startup_timeout_s, config.drain_s, patience.stop_grace_s),
            say=self.screen.line,
            record=record,
            previous=previous,
        )

    async def _answer(self, reconciler: Reconciler) -> None:
        routes = await asyncio.to_thread(_control_routes)  # the web framework loads while others go on
        controller = Controller(
            self.setup.run.launch_id, reconciler, self.doors, self.aim, self._parts, self._configure
        )
        admins = [Admin(self.setup.commands, ""), *([self.setup.admin] if self.setup.admin is not None else [])]
        await together(
            *(
                serve_admin(one, self.doors.table, self.doors.metrics, grace_s=GRACE_S, more=[routes(controller)])
                for one in admins
            )
        )

    def _settings(self, options: Sequence[str]) -> ProxySettings:
        blueprint = self.blueprint
        config = replace(blueprint.config, proxy=(*blueprint.config.proxy, *options))
        settings = build_proxy_settings(replace(blueprint, config=config), self.setup.run.arena)
        return replace(settings, observed=self.setup.admin is None)

    async def _configure(self, options: Sequence[str]) -> None:
        """Noted before anybody goes by it, so that the next life does."""
        every = (*self.options, *options)
        settings = self._settings(every)
        await self.keeper.note(OPTIONS, msgspec.json.encode(every))
        self.options = every
        await self.doors.configure(settings)

    async def _parts(self) -> dict[str, PartJson]:
        groups: Mapping[str, int] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PARTS_S):
                groups = await self.host.groups()
        others = {name: pid for name, pid in groups.items() if name not in self.news.seen}
        return {
            **{row.name: {"pid": row.pid, "restarts": row.restarts} for row in await self.keeper.parts()},
            **{name: {"pid": pid, "restarts": None} for name, pid in {**others, **self.doors.pids}.items()},
        }

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
            await self.keeper.note(READY, b"")
            self.screen.close()
            seconds = time.monotonic() - self.setup.started
            print(ready_message(self.blueprint, self.setup.run.path, self.news.instances(), seconds), flush=True)
            if self.setup.mooncake:
                await self._check_ports()
        await self.keeper.ready()

    async def _check_ports(self) -> None:
        """Mooncake's ports ask nobody who they are: say which answer beyond the address of the stages."""
        for line in await exposure_warnings(dict(await self.host.groups()), STAGE_HOST):
            self.screen.line(line)

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
        await self.doors.end()
        with contextlib.suppress(TimeoutError):  # what is left then is killed by the keeper
            async with asyncio.timeout(CLOSE_S):
                await self.host.close()

    def _with_log(self, error: EpdError) -> str:
        """With the log of the stage that is to blame, which is kept."""
        if isinstance(error, StageError):
            return f"{error}; its log: {self.setup.run.keep_log(error.stage)}"
        return str(error)

    def _kill(self) -> None:
        """No more waiting."""
        self._killing = asyncio.create_task(self.keeper.over(KILLED))


def _control_routes() -> Callable[[Controller], APIRouter]:
    """Loads the web framework: for a thread."""
    import proxy.http.admin  # noqa: F401
    from deploy.control.routes import control_routes

    return control_routes
