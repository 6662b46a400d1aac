"""An agent's side of the stage template (`epd_serve.engine.template`): keeps one running, has it fork stages.

A template that dies costs no stage that runs; another one is started. One that cannot be (an import that fails, a
thread that would be lost) says why, and stages are then executed, as is every stage that it cannot do right. It is
asked on a socket in the run directory, so that the next agent goes on with the same template.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from deploy.agent.stage_life import Noted, Record, Spawn, executed
from deploy.agent.supervisor import StageEvents, StageSpec, Supervisor
from deploy.agent.waits import Patience
from deploy.host import processes
from deploy.host.children import Child, Children
from deploy.host.state import State
from deploy.runtime.protocol import Phase
from epd_serve.engine.argv import OF_A_STAGE_ENV, STAGE_ENV, STAGE_MODULE
from epd_serve.engine.template.messages import API_SERVER_NAME, NUMBER, StageRequest, send_request
from epd_serve.packets import packet_pair

NAME = "template"
"""Of its log, its socket, and its section of the state: the record of its lives."""

PATIENCE = Patience(start_s=300.0, backoff_s=0.1, settled_s=60.0, stop_grace_s=0.0, first_starts=3, short_lives=3)
"""A start imports all of it, on a disk that has not seen it yet."""

ANSWER_S = 20.0
"""For a fork. A template that is stopped gives no answer."""


def api_server_of(group: int) -> int:
    """Pid of the API server of a stage: the leader of its group, or the first that the leader has forked."""
    forked = (one.pid for one in processes.group_members(group) if one.name == API_SERVER_NAME)
    return next(forked, group)


def forkable(command: Spawn) -> bool:
    """Whether this starts a stage of vLLM's, which a template can fork; a simulated one it cannot."""
    return command.argv[1:3] == ("-m", STAGE_MODULE)


def is_wanted(setting: str, device: str, a_stage: Spawn) -> bool:
    """Whether stages are to be forked from one: by `--stage-template`, `always`, `never` or, on CPU, `auto`."""
    return (setting == "always" or (setting == "auto" and device == "cpu")) and forkable(a_stage)


def common_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The part of a stage's environment that it has in common with the others of its launch."""
    return {name: value for name, value in env.items() if name not in OF_A_STAGE_ENV}


class Template(StageEvents):
    """Starts stages as forks of one process. Use `async with template.running():`, and `start` as a supervisor's.

    Args:
        model: what the stages serve.
        env: of the template: what all stages have in common.
        folder: of its log and its socket.
        say: takes a line for the operator.
        children: starts it. state: keeps what the next agent has to know of it.
        program: what Python is told to run; tests put a stand-in here.
    """

    def __init__(
        self,
        model: str,
        env: Mapping[str, str],
        folder: Path,
        say: Callable[[str], None],
        children: Children,
        state: State,
        program: tuple[str, ...] = ("-m", "epd_serve.engine.template"),
    ) -> None:
        self._env = env
        self._socket = folder / f"{NAME}.sock"
        self._say = say
        self._children = children
        self._state = state
        self._execute = executed(children)
        self._supervisor = Supervisor(self, PATIENCE, start=self._execute)
        self._settled = asyncio.Event()  # one is ready, or there will be none
        self._ready = 0  # of one that is ready
        noted = state.read(NAME)
        self._record = Record() if noted is None else msgspec.msgpack.decode(noted, type=Record)
        command = Spawn((sys.executable, *program, str(self._socket), model), env)
        log = folder / f"{NAME}.log"
        self._spec = StageSpec(NAME, "", log, lambda: command, what="the", health=self._health)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """As long as this is open. It goes on with a template that is there; one ends with it, but not by an error."""
        record, process = self._record, None
        if record.pid:
            process = self._children.adopt(record.pid, record.born_ticks)
            if record.phase is Phase.UP:
                self._is_ready(record.pid)
        if record.over:
            self._settled.set()
        else:
            self._supervisor.add(self._spec, record, process)
        try:
            yield
        except BaseException:
            await self._supervisor.leave()
            raise
        await self._supervisor.close()

    async def start(self, command: Spawn, log: BinaryIO, noted: Noted) -> Child:
        """Fork the stage, or execute its command where that cannot be: a `deploy.agent.stage_life.Start`."""
        if not forkable(command):
            return await self._execute(command, log, noted)
        instance = command.env[STAGE_ENV]
        if differing := {name for name, _ in common_environment(command.env).items() ^ self._env.items()}:
            self._say(f"{instance} is not forked, its environment is another: {', '.join(sorted(differing))}")
            return await self._execute(command, log, noted)
        await self._settled.wait()
        if template := self._ready:
            try:
                return await self._fork(command, log, noted)
            except (OSError, EOFError, TimeoutError) as error:
                self._say(f"{instance} is not forked, the template does not answer: {error or type(error).__name__}")
                if self._ready == template:  # the next request waits for the next template
                    self._is_ready(0)
                processes.signal_process(template, signal.SIGKILL)  # whoever knows what it would make of it
        return await self._execute(command, log, noted)

    async def _fork(self, command: Spawn, log: BinaryIO, noted: Noted) -> Child:
        """Raises OSError, EOFError or TimeoutError; a root that was forked all the same then ends itself."""
        request = StageRequest(command.env[STAGE_ENV], list(command.argv[3:]), dict(command.env), self._children.root)
        ours, roots = packet_pair()
        ours.setblocking(False)
        with ours, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as template:
            template.setblocking(False)
            with roots:
                template.connect(str(self._socket))
                send_request(template, request, log.fileno(), roots.fileno())
            async with asyncio.timeout(ANSWER_S):
                answer = await asyncio.get_running_loop().sock_recv(ours, NUMBER.size)
            if len(answer) < NUMBER.size:
                raise EOFError("the fork ended at once")
            return await self._children.begin(NUMBER.unpack(answer)[0], ours, noted)

    async def _health(self, url: str, timeout_s: float) -> int | None:
        """One that has its socket is ready, and stays so until it ends."""
        return 200 if self._socket.exists() else None

    def _is_ready(self, pid: int) -> None:
        """Or is not, where it has none."""
        self._ready = pid
        if pid:
            self._settled.set()
        else:
            self._settled.clear()

    @property
    def pid(self) -> int:
        """0 while none runs."""
        return self._record.pid

    # --- what the supervisor says ---------------------------------------------------------------------------------

    def note(self) -> None:
        self._state.write(NAME, msgspec.msgpack.encode(self._record))

    def before_spawn(self, stage: str) -> None:
        self._socket.unlink(missing_ok=True)

    def up(self, stage: str) -> None:
        self._is_ready(self._record.pid)

    def down(self, stage: str, reason: str, retry_in_s: float | None) -> None:
        self._is_ready(0)
        if retry_in_s is not None:
            self._say("the template has ended; stages that run do not need it, the next ones do")

    def over(self, stage: str, reason: str) -> None:
        self._say(f"stages are started without a template: {reason}")
        self._settled.set()
