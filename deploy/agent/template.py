"""The launcher's side of the stage template (`epd_serve.engine.template`): keeps one running, has it fork stages.

A template that dies costs no stage that runs; another one is started. One that cannot be (an import that fails, a
thread that would be lost) says why, and stages are then executed, as is every stage that it cannot do right.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deploy.agent.stage_life import Process, Spawn, Start, execute
from deploy.agent.stage_log import failure_reason
from deploy.host import processes
from epd_serve.engine.argv import OF_A_STAGE_ENV, STAGE_ENV, STAGE_MODULE
from epd_serve.engine.template.messages import API_SERVER_NAME, NUMBER, READY, StageRequest, encode_request

READY_S = 300.0
"""For importing all of it, on a disk that has not seen it yet."""

ANSWER_S = 20.0
"""For a fork. A template that is stopped gives no answer."""

_POLL_S = 0.1
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
    setting: str, device: str, a_stage: Spawn, model: str, log_path: Path, say: Callable[[str], None]
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
        yield execute
        return
    template = Template(model, common_environment(a_stage.env), log_path, say)
    async with template.running():
        yield template.start


class ForkedRoot:
    """A stage's root: a `stage_life.Process` whose end is told by its connection, because T is its parent."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        if self._exit_code is None:
            try:
                said = self._connection.recv(NUMBER.size)
            except BlockingIOError:
                return None
            except OSError:
                said = b""
            # Without a word: it was killed, and all of the stage with it.
            self._exit_code = NUMBER.unpack(said)[0] if len(said) == NUMBER.size else -signal.SIGKILL
            self._connection.close()
        return self._exit_code


class Template:
    """Starts stages as forks of one process. Use `async with template.running():`, and `start` as a supervisor's.

    Args:
        model: what the stages serve.
        env: of the template: what all stages have in common.
        log_path: file that gets what the template writes.
        say: takes a line for the operator.
        program: what Python is told to run; tests put a stand-in here.
    """

    def __init__(
        self,
        model: str,
        env: Mapping[str, str],
        log_path: Path,
        say: Callable[[str], None],
        program: tuple[str, ...] = ("-m", "epd_serve.engine.template"),
    ) -> None:
        self._env = env
        self._model = model
        self._program = program
        self._log_path = log_path
        self._say = say
        self._settled = asyncio.Event()  # one is ready, or there will be none
        self._ready: _Running | None = None
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
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
            return await execute(command, log)
        instance = command.env[STAGE_ENV]
        if differing := {name for name, _ in common_environment(command.env).items() ^ self._env.items()}:
            self._say(f"{instance} is not forked, its environment is another: {', '.join(sorted(differing))}")
            return await execute(command, log)
        await self._settled.wait()
        if (template := self._ready) is not None:
            request = StageRequest(instance, list(command.argv[3:]), dict(command.env))
            try:
                return await self._fork(template, request, log)
            except (OSError, EOFError, TimeoutError) as error:
                self._say(f"{instance} is not forked, the template does not answer: {error or type(error).__name__}")
                template.process.kill()  # whoever knows what it would make of the next request
        return await execute(command, log)

    async def _fork(self, template: _Running, request: StageRequest, log: BinaryIO) -> Process:
        """Raises OSError, EOFError or TimeoutError; a root that was forked all the same then ends itself."""
        loop = asyncio.get_running_loop()
        ours, roots = socket.socketpair()
        ours.setblocking(False)
        try:
            async with asyncio.timeout(ANSWER_S):
                with roots:
                    async with self._turn:
                        head, body = encode_request(request)
                        socket.send_fds(template.connection, [head], [log.fileno(), roots.fileno()])
                        await loop.sock_sendall(template.connection, body)
                answer = await loop.sock_recv(ours, NUMBER.size)
                if len(answer) < NUMBER.size:
                    raise EOFError("the fork ended at once")
        except BaseException:
            ours.close()
            raise
        return ForkedRoot(NUMBER.unpack(answer)[0], ours)

    async def _keep(self) -> None:
        """One template after the other, until cancelled or until one cannot be."""
        short_lives = 0
        try:
            while short_lives < _SHORT_LIVES:
                begun = time.monotonic()
                if (why := await self._live()) is not None:
                    break
                short_lives = short_lives + 1 if time.monotonic() - begun < _SHORT_S else 0
                self._say("the template has ended; stages that run do not need it, the next ones do")
            else:
                why = f"it has ended {short_lives} times within {_SHORT_S:.0f} s"
        except OSError as error:
            why = str(error)
        finally:
            self._settled.set()
        self._say(f"stages are started without a template: {why}")

    async def _live(self) -> str | None:
        """One template, until it ends. Why it was never ready; None for one that was."""
        ours, its = socket.socketpair()
        ours.setblocking(False)
        with ours, its, self._log_path.open("ab") as log:
            begun = log.tell()
            argv = (sys.executable, *self._program, str(its.fileno()), self._model)
            process = subprocess.Popen(  # noqa: ASYNC220 - returns at once; from a thread it would die with it
                argv,
                env=dict(self._env),
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            its.close()
            try:
                said = await _first_words(ours, process)
                if said != READY:
                    written = self._log_path.read_bytes()[begun:].decode(errors="replace")
                    return said.decode(errors="replace") or failure_reason(written, process.poll())
                self._ready = _Running(process, ours)
                self._settled.set()
                while process.poll() is None:  # noqa: ASYNC110 - there is nothing that could set an event
                    await asyncio.sleep(_POLL_S)
                self._settled.clear()
                return None
            finally:
                self._ready = None
                process.kill()
                process.wait()


@dataclass(frozen=True)
class _Running:
    process: subprocess.Popen[bytes]
    connection: socket.socket


async def _first_words(connection: socket.socket, process: subprocess.Popen[bytes]) -> bytes:
    """`READY`, or why it cannot be; nothing when it ends without a word."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            return connection.recv(4096)
        if process.poll() is not None:
            return b""
        await asyncio.sleep(_POLL_S)
    return f"it was not ready within {READY_S:.0f} s".encode()
