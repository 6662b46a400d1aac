"""An agent as a process under a root, with stand-ins for vLLM.

argv: FOLDER [+OPTION=VALUE…]. It ends with its parent, and everything with it.

FOLDER gets `run`, the root of the run directory; `run_path`; `agent`, the pid of its life of now. What is put there is
heeded: `fatal` (`NUMBER before` or `NUMBER after`) kills the agent at the step of that number that one of its lives
takes, once: each start, each word to a process to go on and each change of what is written down is one;
`flags-<instance>` holds flags for the next life of a stand-in, which takes them once it runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.agent.agent import Agent
from deploy.agent.setup import AgentSetup
from deploy.agent.waits import Patience
from deploy.host import root
from deploy.host.children import Child, Children
from deploy.host.processes import signal_group
from deploy.host.rundir import RunDir, read_groups
from deploy.host.state import State
from deploy.node.routes import NodeWatch, serve_node
from deploy.options import mooncake
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from epd_serve.engine.argv import stage_command
from epd_serve.lifeline import die_with_parent
from epd_serve.stage_plan import StageCommand, StagePlan
from store.mooncake.master import MasterSettings
from tests.deploy.fake_launch import FAKE_MASTER, FAKE_STAGE
from tests.deploy.node_socket import NODE_SOCKET, on_socket

PATIENCE = Patience(poll_s=0.03, backoff_s=0.5, health_every_s=0.05, stop_grace_s=1.0)


class Fatal:
    """Ends this process at the step that is fatal, before it is taken or after it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        number, self._steps = self._steps, self._steps + 1
        self._at(f"{number} before")
        yield
        self._at(f"{number} after")

    def _at(self, moment: str) -> None:
        if self._path.exists() and self._path.read_text() == moment:
            self._path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class MortalChildren(Children):
    def __init__(self, life: root.Life, fatal: Fatal) -> None:
        super().__init__(life.root, life.exits)
        self._fatal = fatal

    async def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        output: int,
        passed: Sequence[int] = (),
        noted: Callable[[Child], None] = lambda child: None,
    ) -> Child:
        with self._fatal.step():
            return await super().spawn(argv, env, output=output, passed=passed, noted=noted)

    async def begin(self, pid: int, channel: socket.socket, noted: Callable[[Child], None]) -> Child:
        with self._fatal.step():
            return await super().begin(pid, channel, noted)


class MortalState:
    """A `State`."""

    def __init__(self, state: State, fatal: Fatal) -> None:
        self.read, self.kept = state.read, state.kept
        self._state = state
        self._fatal = fatal

    def write(self, name: str, content: bytes) -> None:
        if self.read(name) != content:
            with self._fatal.step():
                self._state.write(name, content)


def main() -> int:
    die_with_parent(os.getppid(), signal.SIGTERM)
    folder = Path(sys.argv[1])
    options: dict[str, Any] = dict(flag[1:].split("=", 1) for flag in sys.argv[2:])
    options |= {name: float(value) for name, value in options.items() if name.endswith("_s")}
    root.BACKOFF_S = 0.0  # the next agent comes at once, however short the life of the last one
    mooncake.what_is_missing = lambda device, master: ""  # type: ignore[assignment]
    config = DeployConfig(layout="(E-P)-D", device="cpu", arena_mib=8, kv_staging_mib=4, **options)
    run = RunDir.create(folder / "run")

    def command(plan: StagePlan) -> StageCommand:
        once = folder / f"flags-{plan.instance}"  # the stage takes them: a life may be cut off before it runs
        argv = (sys.executable, FAKE_STAGE, plan.uds or str(plan.port), "--once", str(once))
        return StageCommand(argv, stage_command(plan).env)

    setup = AgentSetup.of(run, draw(config), command, _master, PATIENCE)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(run.socket(NODE_SOCKET)))
        listening.listen()

        async def control(life: root.Life) -> int:
            _write(folder / "agent", str(os.getpid()))
            fatal, watch = Fatal(folder / "fatal"), NodeWatch()
            state: Any = MortalState(life.state, fatal)
            life.heed(lambda number: root.end_now(0))
            agent = Agent(setup, MortalChildren(life, fatal), state, say=watch.say)
            async with agent.running():
                await root.crash_only(serve_node(on_socket(listening), state, watch, agent, None))
            return 1

        _write(folder / "run_path", str(run.path))
        kept = root.Root(
            control,
            drain_s=0.0,
            say=lambda line: None,
            was_ready=lambda sections: True,
            owned=run.held,
        )
        code = kept.serve()
    for group in read_groups(run.path):
        signal_group(group, signal.SIGKILL)
    run.remove()
    return code


def _master(settings: MasterSettings) -> tuple[str, ...]:
    return (sys.executable, FAKE_MASTER, settings.host, str(settings.rpc_port), str(settings.metrics_port))


def _write(path: Path, text: str) -> None:
    unnamed = path.with_suffix(".new")
    unnamed.write_text(text)
    unnamed.rename(path)


if __name__ == "__main__":
    sys.exit(main())
