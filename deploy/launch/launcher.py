"""The composition root: turns a blueprint into running stages and front doors, and takes all of it down again.

Order: what can be wrong cheaply (blueprint) → every port and socket → run directory → what is decided once for all
lives of the process that controls it → that one, forked and kept (`deploy/host/root.py`). Whatever ends it, the same
path back removes processes, sockets, files and shared memory, within 15 s; before that, SIGTERM lets requests in flight
finish (`deploy/host/ending.py`). The process that controls it may die; what a life of it is, `life.py` says.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.agent.agent import Agent
from deploy.agent.second_tier import MasterCommand, mooncake_command
from deploy.agent.setup import AgentSetup
from deploy.agent.waits import Patience
from deploy.agent.wiring import STAGE_HOST
from deploy.control.aim import Aim
from deploy.front.doors import FrontDoors
from deploy.front.shared import Shared
from deploy.host import root
from deploy.host.children import Children
from deploy.host.environment import is_terminal, say
from deploy.host.event_loop import together
from deploy.host.launches import ADMIN_SOCKET, kill_leftovers, reap_dead
from deploy.host.ports import BACKLOG, exposure_warnings, listen, private_socket
from deploy.host.root import Root
from deploy.host.rundir import RunDir
from deploy.launch.admin import Admin, open_admin, serve_admin, serve_page
from deploy.launch.life import API_KEYS, GRACE_S, READY, Deployment, Life, checked_keys, front_options, noted_keys
from deploy.launch.ready_message import ready_message
from deploy.launch.screen import Screen
from deploy.memory.plan import show_memory
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from deploy.plan.proxy_settings import build_proxy_settings, check_certificate
from epd_serve.errors import EpdError, StageError
from epd_serve.stage_plan import StageCommand, StagePlan

if TYPE_CHECKING:
    from fastapi import APIRouter


@dataclass(frozen=True)
class ControlSetup:
    """What every life of it is told. Made before the first.

    Attributes:
        agent: what the stages have in common. api_keys: the text of the clients' keys at first, or "".
        shared: of the front doors. admin: the listener by the flags, if any.
        commands: where `epd-serve status` and the like ask, bound.
        mooncake: whether it runs in a second tier, or between stages.
        started: of `time.monotonic`.
    """

    agent: AgentSetup
    api_keys: str = field(repr=False)
    shared: Shared
    admin: Admin | None
    commands: socket.socket
    mooncake: bool
    screen: Screen
    started: float


async def run_control(setup: ControlSetup, life: root.Life) -> int:
    """Until the launch is over. Returns its exit code."""
    children = life.children()
    agent = Agent(setup.agent, children, life.state, say=setup.screen.line)
    async with agent.running():
        return await root.crash_only(_LocalLife(setup, life, children, agent).run())


class _Process:
    """As a `deploy.launch.life.Process`."""

    def __init__(self, life: root.Life) -> None:
        self.heed = life.heed

    async def over(self, code: int) -> None:
        root.end_now(code)


class _LocalLife(Life):
    def __init__(self, setup: ControlSetup, life: root.Life, children: Children, agent: Agent) -> None:
        self.setup = setup
        self.life = life
        run, blueprint, patience, notes = setup.agent.run, setup.agent.blueprint, setup.agent.patience, life.state
        if notes.read(API_KEYS) is None:
            notes.write(API_KEYS, setup.api_keys.encode())
        deployment = Deployment(
            run.launch_id,
            blueprint,
            patience,
            arena=run.arena,
            api_keys=noted_keys(notes, blueprint.config.api_key_file),
        )
        doors = FrontDoors(
            deployment.settings(front_options(notes)),
            setup.shared,
            children,
            notes,
            grace_s=GRACE_S,
            drain_s=blueprint.config.drain_s,
            say=setup.screen.line,
            launch_id=run.launch_id,
            link_grace_s=patience.links_s,
        )
        super().__init__(deployment, agent, doors, notes, _Process(life), setup.screen, Aim(blueprint))
        self.restarts = {root.CONTROL: life.restarts}

    def introduce(self) -> None:
        if self.blueprint.memory is not None:
            show_memory(self.blueprint.memory, self.setup.agent.run.path, self.screen.line)

    async def answer(self, routes: APIRouter) -> None:
        doors, commands, admin = self.doors, Admin(self.setup.commands, ""), self.setup.admin
        listeners = [serve_admin(commands, doors.table, doors.metrics, grace_s=GRACE_S, more=[routes])]
        if admin is not None:
            listeners.append(serve_page(admin, doors, self.blueprint.config, grace_s=GRACE_S, more=[routes]))
        await together(*listeners)

    async def announce(self) -> None:
        seconds = time.monotonic() - self.setup.started
        print(ready_message(self.blueprint, self.setup.agent.run.path, self.news.instances(), seconds), flush=True)
        if self.setup.mooncake:  # its ports ask nobody who they are: say which answer beyond the stages' address
            for line in await exposure_warnings(dict(await self.host.groups()), STAGE_HOST):
                self.screen.line(line)

    async def explain(self, error: EpdError) -> str:
        """With the log of the stage that is to blame, which is kept."""
        if isinstance(error, StageError):
            return f"{error}; its log: {self.setup.agent.run.keep_log(error.stage)}"
        return str(error)

    async def own_parts(self) -> dict[str, int]:
        return {"root": self.life.root, root.CONTROL: os.getpid()}


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
    master_command_of: MasterCommand = mooncake_command
    patience: Patience = field(default_factory=Patience)

    def run(self) -> int:
        """Blocks until SIGINT or SIGHUP, or until SIGTERM and the end of the requests that were in flight then.

        Returns:
            Exit code: 0 after a signal; 1 when stages or front doors have failed before they were ready once.

        Raises:
            EpdError: port in use, no shared memory; everything is cleaned up by then.
        """
        config = self.blueprint.config
        check_certificate(build_proxy_settings(self.blueprint))  # what is wrong is said before anything starts
        keys = checked_keys(config.api_key_file)
        root = Path(config.run_root) if config.run_root else None
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(listen(config.host, config.port))
            admin = stack.enter_context(open_admin(config.admin_host, config.admin_port, config.admin_key_file))
            screen = Screen(sys.stderr, terminal=is_terminal())
            for launch_id in reap_dead(root):
                screen.line(f"cleaned up after launch {launch_id}, which was killed")
            run = RunDir.create(root)
            stack.callback(run.remove)
            feed, commands = (
                stack.enter_context(private_socket(path)) for path in (run.feed, run.socket(ADMIN_SOCKET))
            )
            commands.listen(BACKLOG)
            agent = AgentSetup.of(run, self.blueprint, self.command_of, self.master_command_of, self.patience)
            shared = Shared.of(listening, feed, config.workers)
            mooncake = bool(agent.tier.address) or config.kv_transport == "mooncake"
            setup = ControlSetup(agent, keys, shared, admin, commands, mooncake, screen, started)

            def take_down() -> None:
                shared.refuse()
                kill_leftovers(run.path)
                run.remove()

            kept = Root(
                partial(run_control, setup),
                drain_s=config.lame_duck_s + config.drain_s,
                say=say,
                was_ready=lambda sections: READY in sections,
                take_down=take_down,
                owned=run.held,
            )
            return kept.serve()
