"""The controller of a launch on this machine: its front doors, its listeners, its screen.

A process of its own, which may die; what a life of it is, `life.py` says.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.agent.waits import Patience
from deploy.agent.wiring import STAGE_HOST
from deploy.control.aim import Aim
from deploy.control.controller import PartJson
from deploy.control.notes import FileNotes
from deploy.front.doors import FrontDoors
from deploy.front.shared import Shared
from deploy.host.event_loop import together
from deploy.host.listeners import exposure_warnings
from deploy.host.rundir import RunDir
from deploy.keeper.interface import Keeper
from deploy.launch.admin import Admin, admin_page, serve_admin
from deploy.launch.life import GRACE_S, Deployment, Host, Life, front_options, noted_keys
from deploy.launch.ready_message import ready_message
from deploy.launch.screen import Screen
from deploy.memory.table import show_memory
from deploy.plan.blueprint import Blueprint
from epd_serve.errors import EpdError, StageError

if TYPE_CHECKING:
    from fastapi import APIRouter


@dataclass(frozen=True)
class ControlSetup:
    """What every life of the controller is told. Made before the first.

    Attributes:
        shared: of the front doors. admin: the listener by the flags, if any.
        commands: where `epd-serve status` and the like ask, bound.
        mooncake: whether it runs in a second tier, or between stages.
        started: of `time.monotonic`.
    """

    blueprint: Blueprint
    run: RunDir
    shared: Shared
    admin: Admin | None
    commands: socket.socket
    mooncake: bool
    patience: Patience
    screen: Screen
    started: float


async def run_controller(setup: ControlSetup, keeper: Keeper, host: Host) -> int:
    """Until the launch is over. Returns its exit code, which the keeper has been told, too."""
    return await _LocalLife(setup, keeper, host).run()


class _LocalLife(Life):
    def __init__(self, setup: ControlSetup, keeper: Keeper, host: Host) -> None:
        self.setup = setup
        self.keeper = keeper
        run = setup.run
        notes = FileNotes(run.path)
        deployment = Deployment(
            run.launch_id,
            setup.blueprint,
            setup.patience,
            arena=run.arena,
            observed=setup.admin is None,
            api_keys=noted_keys(notes, setup.blueprint.config.api_key_file),
        )
        doors = FrontDoors(
            deployment.settings(front_options(notes)),
            setup.shared,
            keeper,
            grace_s=GRACE_S,
            drain_s=setup.blueprint.config.drain_s,
            say=setup.screen.line,
            launch_id=run.launch_id,
            link_grace_s=setup.patience.links_s,
        )
        super().__init__(deployment, host, doors, notes, keeper, setup.screen, Aim(setup.blueprint))

    def introduce(self) -> None:
        if self.blueprint.memory is not None:
            show_memory(self.blueprint.memory, self.setup.run.path, self.screen.line)

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
        print(ready_message(self.blueprint, self.setup.run.path, self.news.instances(), seconds), flush=True)
        if self.setup.mooncake:  # its ports ask nobody who they are: say which answer beyond the stages' address
            for line in await exposure_warnings(dict(await self.host.groups()), STAGE_HOST):
                self.screen.line(line)

    async def explain(self, error: EpdError) -> str:
        """With the log of the stage that is to blame, which is kept."""
        if isinstance(error, StageError):
            return f"{error}; its log: {self.setup.run.keep_log(error.stage)}"
        return str(error)

    async def parts(self) -> Mapping[str, PartJson]:
        others = {**await self.groups(), **self.doors.pids}
        return {
            **{row.name: {"pid": row.pid, "restarts": row.restarts} for row in await self.keeper.parts()},
            **{name: {"pid": pid, "restarts": None} for name, pid in others.items()},
        }
