"""The process that controls a launch on this machine: its stages, its front doors, its listeners, its screen.

It may die; what a life of it is, `life.py` says.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deploy.agent.agent import Agent
from deploy.agent.setup import AgentSetup
from deploy.agent.wiring import STAGE_HOST
from deploy.control.aim import Aim
from deploy.front.doors import FrontDoors
from deploy.front.shared import Shared
from deploy.host import root
from deploy.host.children import Children
from deploy.host.event_loop import together
from deploy.host.listeners import exposure_warnings
from deploy.launch.admin import Admin, admin_page, serve_admin
from deploy.launch.life import API_KEYS, GRACE_S, Deployment, Life, front_options, noted_keys
from deploy.launch.ready_message import ready_message
from deploy.launch.screen import Screen
from deploy.memory.table import show_memory
from epd_serve.errors import EpdError, StageError

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
            observed=setup.admin is None,
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
        table, metrics = self.doors.table, self.doors.metrics
        listeners = [serve_admin(Admin(self.setup.commands, ""), table, metrics, grace_s=GRACE_S, more=[routes])]
        if (admin := self.setup.admin) is not None:
            config = self.blueprint.config
            page = admin_page(admin, self.doors, config.port, tls=bool(config.tls_cert_file))
            listeners.append(serve_admin(admin, table, metrics, grace_s=GRACE_S, page=page, more=[routes]))
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
