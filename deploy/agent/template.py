"""An agent's side of the stage template (`epd_serve.engine.template`): keeps one running, has it fork stages.

A template that dies costs no stage that runs; another one is started. One that cannot be (an import that fails, a
thread that would be lost) says why, and stages are then executed, as is every stage that it cannot do right. The socket
on which it is asked is noted with the keeper, so that the next agent goes on with the same template.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deploy.agent.stage_life import Process, Spawn, Start, executed
from deploy.agent.stage_log import failure_reason
from deploy.host import processes
from deploy.keeper.children import PASSED_FROM
from deploy.keeper.interface import Child, Keeper
from epd_serve.engine.argv import OF_A_STAGE_ENV, STAGE_ENV, STAGE_MODULE
from epd_serve.engine.template.messages import API_SERVER_NAME, GO, NUMBER, READY, StageRequest, send_request
from epd_serve.errors import StageError
from epd_serve.packets import close_all, packet_pair

NAME = "template"
"""Of its entry with the keeper."""

READY_S = 300.0
"""For importing all of it, on a disk that has not seen it yet."""

ANSWER_S = 20.0
"""For a fork. A template that is stopped gives no answer."""

_POLL_S = 0.1
_KILL_TIMEOUT_S = 5.0
_SHORT_LIVES, _SHORT_S = 3, 60.0  # so many templates in a row that lived no longer than this are enough


def api_server_of(group: int) -> int:
    """Pid of the API server of a stage: the leader of its group, or the first that the leader has forked."""
    forked = (one.pid for one in processes.group_members(group) if one.name == API_SERVER_NAME)
    return next(forked, group)


def forkable(command: Spawn) -> bool:
    """Whether this starts a stage of vLLM's, which a template can fork; a simulated one it cannot."""
    return command.argv[1:3] == ("-m", STAGE_MODULE)


def common_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The part of a stage's environment that it has in common with the others of its launch."""
    return {name: value for name, value in env.items() if name not in OF_A_STAGE_ENV}


@contextlib.asynccontextmanager
async def stage_starts(
    setting: str, device: str, a_stage: Spawn, model: str, log_path: Path, say: Callable[[str], None], keeper: Keeper
) -> AsyncIterator[Start]:
    """How the stages of a launch are started, as long as this is open: by a template or as programs of their own.

    Args:
        setting: `always`, `never`, or `auto`: on CPU.
        a_stage: the command of one of them.
        model: what they serve.
        log_path: file that gets what the template writes.
        say: takes a line for the operator.
    """
    wanted = setting == "always" or (setting == "auto" and device == "cpu")
    if not (wanted and forkable(a_stage)):
        yield executed(keeper)
        return
    template = Template(model, common_environment(a_stage.env), log_path, say, keeper)
    async with template.running():
        yield template.start


class Template:
    """Starts stages as forks of one process. Use `async with template.running():`, and `start` as a supervisor's.

    Args:
        model: what the stages serve.
        env: of the template: what all stages have in common.
        log_path: file that gets what the template writes.
        say: takes a line for the operator.
        keeper: whose children the template and its stages are.
        program: what Python is told to run; tests put a stand-in here.
    """

    def __init__(
        self,
        model: str,
        env: Mapping[str, str],
        log_path: Path,
        say: Callable[[str], None],
        keeper: Keeper,
        program: tuple[str, ...] = ("-m", "epd_serve.engine.template"),
    ) -> None:
        self._env = env
        self._model = model
        self._program = program
        self._log_path = log_path
        self._say = say
        self._keeper = keeper
        self._execute = executed(keeper)
        self._settled = asyncio.Event()  # one is ready, or there will be none
        self._ready: _Running | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """As long as this is open. It goes on with a template that is there, and ends it in the end."""
        kept = asyncio.create_task(self._keep(), name="template")
        try:
            yield
        finally:
            kept.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await kept

    async def start(self, command: Spawn, log: BinaryIO) -> Process:
        """Fork the stage, or execute its command where that cannot be: a `deploy.agent.stage_life.Start`."""
        if not forkable(command):
            return await self._execute(command, log)
        instance = command.env[STAGE_ENV]
        if differing := {name for name, _ in common_environment(command.env).items() ^ self._env.items()}:
            self._say(f"{instance} is not forked, its environment is another: {', '.join(sorted(differing))}")
            return await self._execute(command, log)
        await self._settled.wait()
        if (template := self._ready) is not None:
            try:
                return await self._fork(template, command, log)
            except (OSError, EOFError, TimeoutError) as error:
                self._say(f"{instance} is not forked, the template does not answer: {error or type(error).__name__}")
                if self._ready is template:  # the next request waits for the next template
                    self._ready = None
                    self._settled.clear()
                processes.signal_process(template.process.pid, signal.SIGKILL)  # whoever knows what it would make of it
        return await self._execute(command, log)

    async def _fork(self, template: _Running, command: Spawn, log: BinaryIO) -> Process:
        """Raises OSError, EOFError or TimeoutError; a root that was forked all the same then ends itself."""
        request = StageRequest(command.env[STAGE_ENV], list(command.argv[3:]), dict(command.env), self._keeper.pid)
        ours, roots = packet_pair()
        ours.setblocking(False)
        with ours:
            with roots:
                send_request(template.connection, request, log.fileno(), roots.fileno())
            async with asyncio.timeout(ANSWER_S):
                answer = await asyncio.get_running_loop().sock_recv(ours, NUMBER.size)
            if len(answer) < NUMBER.size:
                raise EOFError("the fork ended at once")
            (pid,) = NUMBER.unpack(answer)
            root = await self._keeper.adopt(command.name, pid, tag=command.tag())
            with contextlib.suppress(OSError):  # it has been killed, which its end will tell
                ours.send(GO)
            return root

    async def _keep(self) -> None:
        """One template after the other, until cancelled or until one cannot be."""
        short_lives = 0
        try:
            while short_lives < _SHORT_LIVES:
                begun = time.monotonic()
                lasted = await self._live() and time.monotonic() - begun >= _SHORT_S
                short_lives = 0 if lasted else short_lives + 1
                self._say("the template has ended; stages that run do not need it, the next ones do")
            why = f"it has ended {short_lives} times within {_SHORT_S:.0f} s, or before it was ready"
        except (OSError, StageError) as error:
            why = str(error)
        finally:
            self._settled.set()
        self._say(f"stages are started without a template: {why}")

    async def _live(self) -> bool:
        """One template, until it ends. Whether it was ready; one that is killed before says nothing of the next.

        Raises:
            StageError: there can be none.
        """
        begun = self._log_path.stat().st_size if self._log_path.exists() else 0
        template = await self._adopted() or await self._started()
        try:
            said = await _first_words(template)
            if said != READY:
                if not said:  # its socket may tell its end first
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(template.process.exited(), _KILL_TIMEOUT_S)
                code = template.process.poll()
                if not said and code is not None and code < 0:
                    return False
                written = self._log_path.read_bytes()[begun:].decode(errors="replace")
                raise StageError(said.decode(errors="replace") or failure_reason(written, code), stage=NAME)
            self._ready = template
            self._settled.set()
            await template.process.exited()
            self._settled.clear()
            return True
        finally:
            self._ready = None
            template.connection.close()
            await self._ended(template.process)

    async def _adopted(self) -> _Running | None:
        """That of an agent before us, if it can be asked."""
        found: _Running | None = None
        for entry in await self._keeper.entries():
            if entry.descriptor is None or entry.name != NAME or entry.child is None or entry.child.poll() is not None:
                close_all([] if entry.descriptor is None else [entry.descriptor])
            else:
                found = _Running(entry.child, socket.socket(fileno=entry.descriptor))
        return found

    async def _started(self) -> _Running:
        ours, its = packet_pair()
        ours.setblocking(False)
        argv = (sys.executable, *self._program, str(PASSED_FROM), self._model)
        try:
            with its, self._log_path.open("ab") as log:
                await self._keeper.note(NAME, b"", ours.fileno())  # first: nobody could ask one that is not noted
                child = await self._keeper.spawn(NAME, argv, self._env, output=log.fileno(), passed=[its.fileno()])
        except BaseException:
            ours.close()
            raise
        return _Running(child, ours)

    async def _ended(self, process: Child) -> None:
        """It is ended, if it runs, and forgotten."""
        processes.signal_process(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await process.exited()
                await self._keeper.forget(NAME)


@dataclass(frozen=True)
class _Running:
    process: Child
    connection: socket.socket


async def _first_words(template: _Running) -> bytes:
    """`READY`, or why it cannot be; nothing when it ends without a word. They stay to be heard by the next agent."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            return template.connection.recv(4096, socket.MSG_PEEK)
        if template.process.poll() is not None:
            return b""
        await asyncio.sleep(_POLL_S)
    return f"it was not ready within {READY_S:.0f} s".encode()
