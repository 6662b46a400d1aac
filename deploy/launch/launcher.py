"""The composition root: turns a blueprint into running stages and front doors, and takes all of it down again.

Order: what can be wrong cheaply (blueprint) → every port and socket → run directory → what is decided once for all
lives of the process that controls it → that one, forked and kept (`deploy/host/root.py`). Whatever ends it, the same
path back removes processes, sockets, files and shared memory, within 15 s; before that, SIGTERM lets requests in flight
finish (`deploy/host/ending.py`).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deploy.agent.second_tier import MasterCommand, mooncake_command
from deploy.agent.setup import AgentSetup
from deploy.agent.waits import Patience
from deploy.front.shared import Shared
from deploy.host.environment import is_terminal
from deploy.host.ports import BACKLOG, listen, private_socket
from deploy.host.reaper import kill_leftovers, reap_dead
from deploy.host.root import keep
from deploy.host.rundir import RunDir
from deploy.host.running_launches import ADMIN_SOCKET
from deploy.launch.admin import open_admin
from deploy.launch.controller import ControlSetup, run_control
from deploy.launch.life import READY, checked_keys
from deploy.launch.screen import Screen
from deploy.options.engines import command_of
from deploy.plan.blueprint import Blueprint
from deploy.plan.proxy_settings import build_proxy_settings, check_certificate
from epd_serve.stage_plan import StageCommand, StagePlan


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

            return keep(
                partial(run_control, setup),
                drain_s=config.lame_duck_s + config.drain_s,
                say=_say,
                was_ready=lambda sections: READY in sections,
                take_down=take_down,
                owned=run.held,
            )


def _say(line: str) -> None:
    """A terminal that is held (Ctrl-S) holds nobody up."""
    if select.select([], [2], [], 0)[1]:
        os.write(2, f"{line}\n".encode())
