"""The composition root: turns a blueprint into running stages and a proxy, and takes all of it down again.

Order: what can be wrong cheaply (blueprint) → the public port → run directory and arena → stages under the
supervisor, with the proxy in the same event loop, so that it knows of a death at once → ready message → wait for
a signal. Whatever ends it, the same path back removes processes, sockets, files and shared memory, within 15 s; before
that, SIGTERM lets requests in flight finish (`deploy/host/ending.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.agent.pool_master import mooncake_command
from deploy.agent.second_tier import SecondTier
from deploy.agent.stage_life import Spawn, Start
from deploy.agent.supervisor import Patience, StageSpec, Supervisor
from deploy.agent.template import stage_starts
from deploy.host import event_loop
from deploy.host.ending import Ending
from deploy.host.environment import is_terminal, shm_root, stage_environment
from deploy.host.listeners import exposure_warnings
from deploy.host.ports import free_ports, listen
from deploy.host.reaper import reap_dead
from deploy.host.rundir import RunDir
from deploy.launch.admin import Admin, open_admin
from deploy.launch.front import Front
from deploy.launch.ready_message import ready_message
from deploy.launch.screen import Screen
from deploy.launch.stage_news import StageNews
from deploy.memory.shared_memory import SharedMemory, fit_shared_memory, free_mib
from deploy.memory.table import show_memory
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from deploy.plan.proxy_settings import build_proxy_settings
from deploy.plan.wiring_plan import STAGE_HOST, WiringPlan
from epd_serve.errors import ConfigError, EpdError, StageError
from epd_serve.placement import InstancePlan
from epd_serve.stage_plan import StageCommand, StagePlan
from store.mooncake.master import MasterSettings

if TYPE_CHECKING:
    from proxy.registry.table import InstanceTable

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
        self.tier = SecondTier.of(launch.blueprint, run, STAGE_HOST, launch.master_command_of)
        self.wired = self._wire()
        self.supervisors: list[Supervisor] = []

    def _wire(self) -> WiringPlan:
        blueprint, config = self.blueprint, self.blueprint.config
        memory = fit_shared_memory(
            SharedMemory(config.arena_mib, config.kv_staging_mib),
            blueprint.plans,
            features_travel=blueprint.features_travel,
            free=free_mib(shm_root()),
        )
        ports = dict(zip((plan.id for plan in blueprint.plans), free_ports(len(blueprint.plans)), strict=True))
        if config.trace_dir:
            try:
                Path(config.trace_dir).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--trace-dir {config.trace_dir} cannot be made: {error.strerror}", param="--trace-dir"
                ) from error
        return WiringPlan(blueprint, self.run, ports, memory, self.tier.address)

    async def serve(self) -> int:
        self.ending.listen()
        if self.blueprint.memory is not None:
            show_memory(self.blueprint.memory, self.run.path, self.screen.line)
        for warning in self.blueprint.warnings:
            self.screen.line(f"warning: {warning}")
        async with self._stage_starts() as start, self._arena(), self.tier.running(self.screen.line) as master:
            front_door = self._front()
            table = front_door.table
            self.news = StageNews(self.wired, table, self.screen)
            supervisor = Supervisor(
                [self._spec(plan) for plan in self.blueprint.plans],
                self.news,
                replace(self.launch.patience, start_s=self.blueprint.config.startup_timeout_s),
                parallel_starts=self.blueprint.config.parallel_starts if self.blueprint.device == "cpu" else 0,
                start=start,
            )
            self.supervisors += [one for one in (master, supervisor) if one is not None]
            self.screen.open([plan.id for plan in self.blueprint.plans])
            stages = asyncio.create_task(supervisor.run(), name="stages")
            front = asyncio.create_task(front_door.serve(), name="proxy")
            try:
                await self._until_stopped(_ready(supervisor, table), stages, front)
            except StageError as error:
                raise StageError(f"{error}; its log: {self.run.keep_log(error.stage)}", stage=error.stage) from None
            finally:
                await self._take_down(front, stages)
        return 0

    def _front(self) -> Front:
        config = self.blueprint.config
        return Front(
            build_proxy_settings(self.blueprint, self.run.arena),
            self.listening,
            host=config.host,
            port=config.port,
            workers=config.workers,
            grace_s=GRACE_S,
            drain_s=config.drain_s,
            serves=self.ending.serves,
            say=self.screen.line,
            launch_id=self.run.launch_id,
            admin=self.admin,
            link_grace_s=self.launch.patience.links_s,
        )

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
                    print(ready_message(self.wired, seconds, self.news.grants), flush=True)
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

    @contextlib.asynccontextmanager
    async def _arena(self) -> AsyncIterator[None]:
        """The host arena exists, pre-faulted, before any stage attaches to it."""
        if not self.blueprint.features_travel:
            yield
            return
        from store.arena import Arena

        arena = await asyncio.to_thread(
            Arena.create, str(self.run.arena), capacity_bytes=self.wired.memory.arena_mib << 20
        )
        try:
            yield
        finally:
            arena.close()

    async def _check_ports(self) -> None:
        """Mooncake's ports ask nobody who they are: say which answer beyond the address of the stages."""
        if self.tier.address or self.blueprint.config.kv_transport == "mooncake":
            for supervisor in self.supervisors:
                for line in await exposure_warnings(supervisor.groups(), STAGE_HOST):
                    self.screen.line(line)

    def _stage_starts(self) -> contextlib.AbstractAsyncContextManager[Start]:
        config, device = self.blueprint.config, self.blueprint.device
        a_stage = self._command(self.blueprint.plans[0], "")
        return stage_starts(
            config.stage_template, device, a_stage, self.blueprint.model, self.run.log("template"), self.screen.line
        )

    def _command(self, plan: InstancePlan, incarnation: str) -> Spawn:
        made = self.launch.command_of(self.wired.stage(plan, incarnation))
        return Spawn(made.argv, stage_environment(made.env, self.run.path, self.blueprint.device))

    def _spec(self, plan: InstancePlan) -> StageSpec:
        def command(incarnation: str) -> Spawn:
            return self._command(plan, incarnation)

        # Memory is profiled at the start on NPU and CUDA: neighbours on a device must not start together.
        profiled = self.blueprint.device != "cpu" and plan.colocated_with
        turn = ",".join(map(str, plan.devices)) if profiled else ""
        return StageSpec(plan.id, STAGE_HOST, self.wired.ports[plan.id], self.run.log(plan.id), command, turn)

    def _kill(self) -> None:
        """No more waiting."""
        for supervisor in self.supervisors:
            supervisor.kill_now()
        self.run.remove()
        os._exit(130)


async def _ready(supervisor: Supervisor, table: InstanceTable) -> None:
    """Every stage has answered, and none waits for its KV links."""
    await supervisor.all_up.wait()
    while any(view.warming for view in table.snapshot()):
        await table.changed(1.0)
