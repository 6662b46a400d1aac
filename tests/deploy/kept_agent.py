"""An agent as a process under a keeper, with stand-ins for vLLM.

argv: FOLDER [+OPTION=VALUE…]. It ends with its parent, and everything with it.

FOLDER gets `run`, the root of the run directory; `run_path`; `agent`, the pid of its life of now. What is put there is
heeded: `fatal` (`NUMBER before` or `NUMBER after`) kills the agent at the request of that number that one of its lives
makes of the keeper, once; `flags-<instance>` holds flags for the next life of a stand-in.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from deploy.agent.process import run_agent
from deploy.agent.setup import AgentSetup
from deploy.agent.waits import Patience
from deploy.host.environment import module_command
from deploy.host.parent_death_exec import parent_death_exec
from deploy.host.processes import signal_group
from deploy.host.rundir import RunDir, read_groups
from deploy.keeper import part
from deploy.keeper.interface import Keeper
from deploy.keeper.keeper import keep
from deploy.keeper.part import Part
from deploy.options import mooncake
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.runtime.messages import AGENT_SOCKET
from epd_serve.engine.argv import stage_command
from epd_serve.lifeline import die_with_parent
from epd_serve.stage_plan import StageCommand, StagePlan
from store.mooncake.master import MasterSettings
from tests.deploy.fake_launch import FAKE_MASTER, FAKE_STAGE

PATIENCE = Patience(poll_s=0.03, backoff_s=0.5, health_every_s=0.05, stop_grace_s=1.0)


class MortalKeeper:
    """Ends this process at the request that is fatal, before it is made or when it is answered."""

    def __init__(self, keeper: Keeper, fatal: Path) -> None:
        self.pid = keeper.pid
        self._keeper = keeper
        self._fatal = fatal
        self._requests = 0

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._keeper, name)

        async def made(*args: Any, **options: Any) -> Any:
            number, self._requests = self._requests, self._requests + 1
            self._at(f"{number} before")
            answer = await request(*args, **options)
            self._at(f"{number} after")
            return answer

        return made

    def _at(self, moment: str) -> None:
        if self._fatal.exists() and self._fatal.read_text() == moment:
            self._fatal.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    die_with_parent(os.getppid(), signal.SIGTERM)
    folder, keeper_pid = Path(sys.argv[1]), os.getpid()
    options: dict[str, Any] = dict(flag[1:].split("=", 1) for flag in sys.argv[2:])
    options |= {name: float(value) for name, value in options.items() if name.endswith("_s")}
    part.BACKOFF_S = 0.0  # the next agent comes at once, however short the life of the last one
    mooncake.what_is_missing = lambda device, master: ""  # type: ignore[assignment]
    config = DeployConfig(layout="(E-P)-D", device="cpu", arena_mib=8, kv_staging_mib=4, **options)
    run = RunDir.create(folder / "run")

    def command(plan: StagePlan) -> StageCommand:
        flags = _taken(folder / f"flags-{plan.instance}")
        argv = parent_death_exec((sys.executable, FAKE_STAGE, plan.uds or str(plan.port), *flags), parent=keeper_pid)
        return StageCommand(module_command(*argv), stage_command(plan).env)

    setup = AgentSetup.of(run, draw(config), command, _master, PATIENCE)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(run.socket(AGENT_SOCKET)))
        listening.listen()

        async def agent(keeper: Keeper) -> int:
            _write(folder / "agent", str(os.getpid()))
            return await run_agent(setup, MortalKeeper(keeper, folder / "fatal"), listening)

        _write(folder / "run_path", str(run.path))
        code = keep(
            [Part("controller", _controller, controls=True), Part("agent", agent)],
            drain_s=0.0,
            say=lambda line: None,
            owned=run.held,
        )
    for group in read_groups(run.path):
        signal_group(group, signal.SIGKILL)
    run.remove()
    return code


async def _controller(keeper: Keeper) -> int:
    """Ends with a signal."""
    await keeper.ready()
    async for _ in keeper.signals():
        await keeper.over(0)
    return 0


def _master(settings: MasterSettings) -> tuple[str, ...]:
    return (sys.executable, FAKE_MASTER, settings.host, str(settings.rpc_port), str(settings.metrics_port))


def _taken(path: Path) -> list[str]:
    """The flags in a file, which then is gone."""
    flags = shlex.split(path.read_text()) if path.exists() else []
    path.unlink(missing_ok=True)
    return flags


def _write(path: Path, text: str) -> None:
    unnamed = path.with_suffix(".new")
    unnamed.write_text(text)
    unnamed.rename(path)


if __name__ == "__main__":
    sys.exit(main())
