"""The composition root: turns a blueprint into running stages and a proxy, and takes all of it down again.

Order: what can be wrong cheaply (blueprint) → the public port → run directory and arena → stages under the
supervisor, and the front doors, which are processes of their own and are told of a death at once → ready message →
wait for a signal. Whatever ends it, the same path back removes processes, sockets, files and shared memory, within
15 s; before that, SIGTERM lets requests in flight finish (`deploy/host/ending.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.agent.agent import Agent
from deploy.agent.pool_master import mooncake_command
from deploy.agent.setup import AgentSetup
from deploy.agent.specs import orders
from deploy.agent.waits import Patience
from deploy.agent.wiring import STAGE_HOST
from deploy.control.aim import Aim
from deploy.control.controller import Controller
from deploy.control.failure import Deadlines
from deploy.control.journal import Journal
from deploy.control.reconciler import Reconciler
from deploy.front.doors import FrontDoors
from deploy.host import event_loop
from deploy.host.ending import Ending
from deploy.host.environment import is_terminal
from deploy.host.listeners import exposure_warnings
from deploy.host.ports import listen
from deploy.host.processes import signal_group
from deploy.host.reaper import reap_dead
from deploy.host.rundir import RunDir
from deploy.host.running_launches import ADMIN_SOCKET
from deploy.keeper.client import InProcess
from deploy.launch.admin import Admin, open_admin, private_socket, serve_admin
from deploy.launch.ready_message import ready_message
from deploy.launch.screen import Screen
from deploy.launch.stage_news import StageNews
from deploy.memory.table import show_memory
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from deploy.plan.proxy_settings import build_proxy_settings
from epd_serve.errors import EpdError, StageError
from epd_serve.stage_plan import StageCommand, StagePlan
from store.mooncake.master import MasterSettings

if TYPE_CHECKING:
    from fastapi import APIRouter

GRACE_S = 2.0
"""How long requests in flight may go on when all is taken down; with the stages' 8 s the end is below 15 s away."""


@dataclass(frozen=True)
class Launch:
    """Serve one blueprint until a signal.

    Attributes:
        command_of: makes a stage's command; tests put a stand-in for vLLM here.
        master_command_of: makes the argv of Mooncake's master; tests put a stand-in here.
        patience: the supervisor's waits.
    """

    blueprint: Blueprint
    command_of: Callable[[StagePlan], StageCommand] = command_of
    master_command_of: Callable[[MasterSettings], tuple[str, ...]] = mooncake_command
    patience: Patience = field(default_factory=Patience)

    def run(self) -> int:
        """Blocks until SIGINT or SIGHUP, or until SIGTERM and the end of the requests that were in flight then.

        Returns:
            Exit code: 0 after a signal.

        Raises:
            EpdError: port in use, no shared memory, a stage that does not start; everything is cleaned up by then.
        """
        config = self.blueprint.config
        build_proxy_settings(self.blueprint)  # what is wrong with `--proxy` is said before anything starts
        root = Path(config.run_root) if config.run_root else None
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(listen(config.host, config.port))
            admin = stack.enter_context(open_admin(config.admin_host, config.admin_port, config.admin_key_file))
            screen = Screen(sys.stderr, terminal=is_terminal())
            for launch_id in reap_dead(root):
                screen.line(f"cleaned up after launch {launch_id}, which was killed")
            run = RunDir.create(root)
            stack.callback(run.remove)
            return event_loop.run(_Session(self, run, listening, admin, screen).serve())


class _Session:
    """The life of one launch in its event loop."""

    def __init__(
        self, launch: Launch, run: RunDir, listening: socket.socket, admin: Admin | None, screen: Screen
    ) -> None:
        self.launch = launch
        self.blueprint = launch.blueprint
        self.run = run
        self.listening = listening
        self.admin = admin
        self.screen = screen
        self.started = time.monotonic()
        self.ending = Ending(
            launch.blueprint.config.lame_duck_s, launch.blueprint.config.drain_s, screen.line, self._kill
        )
        self.keeper = InProcess()
        self.setup = AgentSetup.of(run, self.blueprint, launch.command_of, launch.master_command_of, launch.patience)
        self.agent = Agent(self.setup, self.keeper, say=screen.line)
        self.aim = Aim(self.blueprint)

    async def serve(self) -> int:
        self.ending.listen()
        if self.blueprint.memory is not None:
            show_memory(self.blueprint.memory, self.run.path, self.screen.line)
        for warning in self.blueprint.warnings:
            self.screen.line(f"warning: {warning}")
        first = orders(self.blueprint)
        async with self.agent.running():
            doors = self._front_doors()
            self.ending.serves(doors)
            self.news = StageNews(self.screen, [order.id for order in first])
            reconciler = self._reconciler(doors)
            self.screen.open([order.id for order in first])
            for order in first:
                await self.agent.start(order)
            stages = asyncio.create_task(_together(self.news.follow(self.agent), reconciler.run()), name="stages")
            front = asyncio.create_task(self._serve(doors, reconciler), name="proxy")
            try:
                await self._until_stopped(_ready(self.news, doors), stages, front)
            except StageError as error:
                raise StageError(f"{error}; its log: {self.run.keep_log(error.stage)}", stage=error.stage) from None
            finally:
                await self._take_down(front, stages)
                await self.agent.close()
        return 0

    def _front_doors(self) -> FrontDoors:
        config = self.blueprint.config
        return FrontDoors(
            replace(build_proxy_settings(self.blueprint, self.run.arena), observed=self.admin is None),
            self.listening,
            self.run.feed,
            workers=config.workers,
            grace_s=GRACE_S,
            drain_s=config.drain_s,
            say=self.screen.line,
            launch_id=self.run.launch_id,
            link_grace_s=self.launch.patience.links_s,
        )

    def _reconciler(self, doors: FrontDoors) -> Reconciler:
        config, patience = self.blueprint.config, self.launch.patience
        return Reconciler(
            self.agent,
            doors,
            Journal(self.run.wanted),
            self.aim.first(),
            deadlines=Deadlines(config.startup_timeout_s, config.drain_s, patience.stop_grace_s),
            staging_bytes=self.setup.staging_bytes,
            arena_bytes=self.setup.arena_bytes,
            say=self.screen.line,
        )

    async def _serve(self, doors: FrontDoors, reconciler: Reconciler) -> None:
        """The front doors, and the listeners of those who run it."""
        serving = asyncio.create_task(doors.serve())  # the web framework loads while they start
        try:
            routes = await asyncio.to_thread(_control_routes)
            controller = Controller(self.run.launch_id, reconciler, doors, self.aim)
            with private_socket(self.run.socket(ADMIN_SOCKET)) as own:
                admins = [Admin(own, ""), *([self.admin] if self.admin is not None else [])]
                await _together(
                    serving,
                    *(
                        serve_admin(one, doors.table, doors.metrics, grace_s=GRACE_S, more=[routes(controller)])
                        for one in admins
                    ),
                )
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    async def _until_stopped(
        self, all_ready: Coroutine[None, None, None], stages: asyncio.Task[None], front: asyncio.Task[None]
    ) -> None:
        """Show progress, say ready, wait. Returns on a signal, raises what ended stages or proxy."""
        ready = asyncio.create_task(all_ready)
        stopped = asyncio.create_task(self.ending.wait())
        waiting: set[asyncio.Task[object]] = {ready, stopped, stages, front}
        checking: asyncio.Task[None] | None = None
        try:
            while not (stopped.done() or stages.done() or front.done()):
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=None if ready.done() else 1.0)
                if ready.done() and ready in waiting:
                    waiting.discard(ready)
                    ready.result()
                    self.screen.close()
                    seconds = time.monotonic() - self.started
                    print(ready_message(self.blueprint, self.run.path, self.news.instances(), seconds), flush=True)
                    checking = asyncio.create_task(self._check_ports())
                elif not ready.done():
                    self.screen.tick()
        finally:
            for task in (ready, stopped, checking):
                if task is not None:
                    task.cancel()
        for task in (stages, front):
            if task.done() and not stopped.done():
                task.result()  # raises what ended it
                raise EpdError(f"the {task.get_name()} ended unexpectedly")

    async def _take_down(self, front: asyncio.Task[None], stages: asyncio.Task[None]) -> None:
        """First no new requests, then the stages. Both end by cancellation; their own failures were raised before."""
        self.screen.close()
        if self.ending.stopping.is_set():
            self.screen.line("stopping")
        for task in (front, stages):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, EpdError):
                await task

    async def _check_ports(self) -> None:
        """Mooncake's ports ask nobody who they are: say which answer beyond the address of the stages."""
        if self.setup.master_address or self.blueprint.config.kv_transport == "mooncake":
            for line in await exposure_warnings(self.agent.groups(), STAGE_HOST):
                self.screen.line(line)

    def _kill(self) -> None:
        """No more waiting."""
        for group in self.agent.groups().values():
            signal_group(group, signal.SIGKILL)
        self.run.remove()
        os._exit(130)


def _control_routes() -> Callable[[Controller], APIRouter]:
    """Loads the web framework: for a thread."""
    import proxy.http.admin  # noqa: F401
    from deploy.control.routes import control_routes

    return control_routes


async def _together(*tasks: Coroutine[None, None, None] | asyncio.Task[None]) -> None:
    """All of them, until one fails: then all end. Raises the most telling of their errors."""
    from proxy.errors import most_telling

    async def until_over(one: Coroutine[None, None, None] | asyncio.Task[None]) -> None:
        await one

    try:
        async with asyncio.TaskGroup() as group:
            for one in tasks:
                group.create_task(until_over(one))
    except BaseExceptionGroup as failed:
        raise most_telling(failed) from None


async def _ready(news: StageNews, doors: FrontDoors) -> None:
    """Every stage has answered, none waits for its KV links, and the front doors know."""
    await news.all_up.wait()
    while not all(view.up for view in doors.table.snapshot()) or len(doors.table.snapshot()) < len(news.instances()):
        await doors.table.changed(1.0)
    await doors.ready()
