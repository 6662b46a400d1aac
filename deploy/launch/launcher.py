"""The composition root: turns a blueprint into running stages and a proxy, and takes all of it down again.

Order: what can be wrong cheaply (blueprint) → the public port → run directory → agent, with arena and stages, and
controller, with the front doors. Whatever ends it, the same path back removes processes, sockets, files and shared
memory, within 15 s; before that, SIGTERM lets requests in flight finish (`deploy/host/ending.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from deploy.agent.agent import Agent
from deploy.agent.pool_master import mooncake_command
from deploy.agent.setup import AgentSetup
from deploy.agent.waits import Patience
from deploy.front.shared import Shared
from deploy.host import event_loop
from deploy.host.ending import SIGNALS
from deploy.host.environment import is_terminal
from deploy.host.ports import listen
from deploy.host.processes import signal_group
from deploy.host.reaper import reap_dead
from deploy.host.rundir import RunDir
from deploy.host.running_launches import ADMIN_SOCKET
from deploy.keeper.client import InProcess
from deploy.launch.admin import open_admin, private_socket
from deploy.launch.controller import KILLED, ControlSetup, run_controller
from deploy.launch.screen import Screen
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from deploy.plan.proxy_settings import build_proxy_settings
from deploy.runtime.protocol import Node, Observed, Order
from epd_serve.roles import Role
from epd_serve.stage_plan import StageCommand, StagePlan
from store.mooncake.master import MasterSettings


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
            Exit code: 0 after a signal, 1 where the first start has failed, which is said by then.

        Raises:
            EpdError: port in use, no shared memory; everything is cleaned up by then.
        """
        config, started = self.blueprint.config, time.monotonic()
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
            agent = AgentSetup.of(run, self.blueprint, self.command_of, self.master_command_of, self.patience)
            control = ControlSetup(
                self.blueprint,
                run,
                Shared.of(listening, stack.enter_context(private_socket(run.feed)), config.workers),
                admin,
                stack.enter_context(private_socket(run.socket(ADMIN_SOCKET))),
                agent.memory,
                bool(agent.master_address) or config.kv_transport == "mooncake",
                self.patience,
                screen,
                started,
            )
            return event_loop.run(_in_one_process(control, agent))


async def _in_one_process(control: ControlSetup, setup: AgentSetup) -> int:
    agent = Agent(setup, InProcess(), say=control.screen.line)
    keeper = _Keeper(agent, control.run)
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, keeper.tell, number)
    async with agent.running():
        return await run_controller(control, keeper, _Here(agent))


class _Here:
    """An agent in the same event loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def nodes(self) -> tuple[Node, ...]:
        return await self._agent.nodes()

    async def start(self, order: Order) -> None:
        await self._agent.start(order)

    async def flip(self, id: str, role: Role) -> None:
        await self._agent.flip(id, role)

    async def drain(self, id: str) -> None:
        await self._agent.drain(id)

    async def stop(self, id: str, grace_s: float) -> None:
        await self._agent.stop(id, grace_s)

    def watch(self) -> AsyncIterator[tuple[Observed, ...]]:
        return self._agent.watch()

    async def groups(self) -> dict[str, int]:
        return self._agent.groups()

    async def close(self) -> None:
        await self._agent.close()


class _Keeper(InProcess):
    def __init__(self, agent: Agent, run: RunDir) -> None:
        super().__init__()
        self._agent = agent
        self._run = run

    async def over(self, code: int) -> None:
        if code == KILLED:
            for group in self._agent.groups().values():
                signal_group(group, signal.SIGKILL)
            self._run.remove()
            os._exit(code)
        await super().over(code)
