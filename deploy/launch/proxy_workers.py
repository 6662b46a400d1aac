"""Several proxy processes behind one listening socket: starts them, restarts the dead, ends them all.

The parent keeps the socket, so that no connection is refused while one of them is away, and the memory of the counters
they share. What is said to them is `proxy/workers/hub.py`'s business. One that dies takes its clients' connections
with it, and nothing else: what it held is released in the counters as soon as it is collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.host.environment import module_command
from epd_serve.errors import EpdError

if TYPE_CHECKING:
    from proxy.workers.hub import WorkerHub
    from proxy.workers.shared_counters import SharedCounters

logger = logging.getLogger(__name__)
POLL_S = 0.02
START_S = 60.0
SETTLED_S = 10.0
BACKOFF_S, BACKOFF_MAX_S = 0.1, 10.0
ENDING_S = 5.0
"""Beyond the grace that requests in flight get."""


@dataclass
class _Lived:
    """How a life of a worker went."""

    served_s: float | None = None
    reason: str = ""


class ProxyWorkers:
    """Runs as many workers as the shared counters have rows.

    Args:
        counters, memory: the shared counters, and the descriptor of their memory.
        listening: what all of them accept from. It has to be listening.
        environment: of the processes.
        grace_s: how long a worker that is told to end may take.
        say: takes a line for the operator.
    """

    def __init__(
        self,
        hub: WorkerHub,
        counters: SharedCounters,
        memory: int,
        listening: socket.socket,
        environment: Mapping[str, str],
        *,
        grace_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._hub = hub
        self._counters = counters
        self._memory = memory
        self._listening = listening
        self._environment = environment
        self._grace_s = grace_s
        self._say = say
        self.pids: dict[int, int] = {}

    async def run(self) -> None:
        """Until cancelled; then ends them gracefully.

        Raises:
            EpdError: a worker did not get as far as serving when it was started first.
        """
        self._hub.start()
        try:
            async with asyncio.TaskGroup() as group:
                for row in range(self._counters.rows):
                    group.create_task(self._keep(row), name=f"proxy worker {row}")
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            await self._hub.stop()

    async def _keep(self, row: int) -> None:
        failures, ever_served = 0, False
        while True:
            lived = _Lived()
            try:
                await self._live(row, lived)
            except OSError as error:  # no process, no descriptor, no memory left: another time there may be
                lived.reason = f"it cannot be started: {error}"
            if lived.served_s is None and not ever_served:
                raise EpdError(f"proxy worker {row} did not start: {lived.reason}")
            ever_served = True
            failures = 0 if (lived.served_s or 0.0) >= SETTLED_S else failures + 1
            delay_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(failures, 16))
            self._say(f"proxy worker {row} ended: {lived.reason}; another starts in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)

    async def _live(self, row: int, lived: _Lived) -> None:
        """One life, from its start until it is collected."""
        from proxy.workers.shared_ledger import settle

        ours, theirs = socket.socketpair()
        with theirs:
            process = self._spawn(theirs)
        self.pids[row] = process.pid
        began: list[float] = []
        serving = asyncio.Event()

        def served() -> None:
            began.append(time.monotonic())
            serving.set()

        attending = asyncio.create_task(self._hub.attend(row, ours, served))
        try:
            lived.reason = await _until_trouble(process, attending, serving)
        finally:
            if began:
                lived.served_s = time.monotonic() - began[0]
            await self._end(process, attending)
            del self.pids[row]
            settle(self._counters, row)

    def _spawn(self, feed: socket.socket) -> subprocess.Popen[bytes]:
        inherited = (feed.fileno(), self._listening.fileno(), self._memory)
        return subprocess.Popen(
            module_command("deploy.launch.proxy_worker", *map(str, inherited)),
            env=dict(self._environment),
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
        )

    async def _end(self, process: subprocess.Popen[bytes], attending: asyncio.Task[None]) -> None:
        """Gracefully, if it lives and is heard; it is told of its instances until the end."""
        try:
            if process.poll() is None and not attending.done():
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._grace_s + ENDING_S):
                        await _exited(process)
        finally:
            process.kill()
            process.wait()
            attending.cancel()
            await asyncio.wait([attending])


async def _until_trouble(
    process: subprocess.Popen[bytes], attending: asyncio.Task[None], serving: asyncio.Event
) -> str:
    """Why a worker is to be followed by another."""
    exited, served = asyncio.create_task(_exited(process)), asyncio.create_task(serving.wait())
    try:
        await asyncio.wait((exited, attending, served), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not (exited.done() or attending.done() or served.done()):
            return f"it does not serve after {START_S:.0f} s"
        await asyncio.wait((exited, attending), return_when=asyncio.FIRST_COMPLETED)
        if attending.done() and not exited.done() and (error := attending.exception()) is not None:
            if not isinstance(error, EpdError):  # a defect of ours costs this worker, not all of them and the stages
                logger.error("talking with a proxy worker failed", exc_info=error)
            return str(error) or type(error).__name__
        # Its end of the feed closes a moment before it has gone.
        await asyncio.wait((exited,), timeout=ENDING_S)
        return _how(exited.result()) if exited.done() else "it has closed its feed and does not end"
    finally:
        exited.cancel()
        served.cancel()


async def _exited(process: subprocess.Popen[bytes]) -> int:
    while True:  # a poll, because pidfds and child watchers are missing in some containers
        if (code := process.poll()) is not None:
            return code
        await asyncio.sleep(POLL_S)


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
