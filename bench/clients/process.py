"""Processes that a measurement directs, a message in, a message out, over a pipe; the request sender is one of them.

Owns the pipe and its deadlines, on both ends. A child ends when its parent's end of the pipe does, so none outlives the
measurement. The sender has a process of its own so that it shares no interpreter with what is measured, nor with who
measures. A run may go on while the measurement does other things: `start`, then `finish`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.clients.results import LIMIT_S
from bench.clients.sender import Bounds, Flow, Run, Sender
from bench.clients.target import Target
from deploy.host import event_loop
from epd_serve.errors import StageError

STOP_S = 10.0


@dataclass(frozen=True)
class _Failure:
    """What a child sends instead of an answer. `text`: its traceback."""

    text: str


class Child:
    """`main(pipe, *given)` of a module in a new interpreter: reads orders until None comes, and sends answers.

    Args:
        module: what it prints goes to stderr.
        env: variables that are set before it is imported.
    """

    def __init__(self, module: str, *given: Any, env: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = module
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(module, theirs, dict(env or {}), given), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None, "started"
        return pid

    def tell(self, order: Any) -> None:
        """Raises StageError where the child is gone."""
        try:
            self._pipe.send(order)
        except OSError:
            raise self._error("is gone") from None

    def hear(self, timeout_s: float = 60.0) -> Any:
        """The next answer. Raises StageError where the child failed, ended or said nothing in time."""
        try:
            answer = self._pipe.recv() if self._pipe.poll(timeout_s) else _Failure(f"said nothing for {timeout_s:g} s")
        except (EOFError, OSError):
            answer = _Failure("ended")
        if isinstance(answer, _Failure):
            raise self._error(answer.text)
        return answer

    def ask(self, order: Any, timeout_s: float = 60.0) -> Any:
        self.tell(order)
        return self.hear(timeout_s)

    def stop(self) -> None:
        """End of orders, then of patience."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(STOP_S)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _error(self, what: str) -> StageError:
        return StageError(f"{self._name} {what}", stage=self._name)


def _run(module: str, pipe: Connection, env: Mapping[str, str], given: tuple[Any, ...]) -> None:
    """In the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who measures ends this one
    os.dup2(2, 1)
    os.environ.update(env)
    with contextlib.suppress(EOFError, BrokenPipeError):  # nobody is there who asks
        try:
            importlib.import_module(module).main(pipe, *given)
        except EOFError:
            raise
        except Exception:  # noqa: BLE001  (whoever asked raises it)
            pipe.send(_Failure(f"failed:\n{traceback.format_exc()}"))


ENOUGH = "enough"
MARGIN_S = 60.0
"""Over the time that the slowest request may take."""


class SenderProcess(Child):
    """A sender process. Use as a context manager; leaving it ends what is still being sent."""

    def __init__(self) -> None:
        super().__init__(__name__)
        self._ends_s = 0.0

    def __enter__(self) -> SenderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def run(self, url: str, *flows: Flow, within_s: float = 0.0, limit_s: float = LIMIT_S, decode: bool = False) -> Run:
        """`start`, then `finish`."""
        self.start(url, *flows, within_s=within_s, limit_s=limit_s, decode=decode)
        return self.finish()

    def start(
        self,
        url: Target | str,
        *flows: Flow,
        within_s: float = 0.0,
        limit_s: float = LIMIT_S,
        decode: bool = False,
        keep_text: bool = False,
    ) -> None:
        """Begin to send.

        Args:
            within_s: how long flows with a `count` alone may take. limit_s: the same of one request.
            decode: reads every token; else first byte, end and outcome alone. keep_text: of what is decoded.
        """
        last_s = max(max(flow.dues or (0.0,)) + (flow.duration_s or 0.0) for flow in flows)
        self._ends_s = max(last_s, within_s) + limit_s + MARGIN_S
        options = {"bounds": Bounds(limit_s), "decode": decode, "keep_text": keep_text, "realtime": False}
        self.tell((url, flows, options))

    def enough(self) -> None:
        """Send no more; what is under way is answered. Before `finish`, which then returns sooner."""
        self.tell(ENOUGH)

    def finish(self) -> Run:
        """Wait until every request has ended. Raises StageError where that takes too long, or the process failed."""
        found = self.hear(self._ends_s)
        if not isinstance(found, Run):
            raise StageError(f"the load failed: {found}", stage="load")
        return found


def main(pipe: Connection) -> None:
    """In the process: send what comes, until nobody is there who asks."""
    for order in iter(pipe.recv, None):
        if order == ENOUGH:  # it had all been sent
            continue
        url, flows, options = order
        try:
            pipe.send(event_loop.run(_sent(pipe, Sender(url, **options), flows)))
        except BaseExceptionGroup as group:
            pipe.send("; ".join(sorted({repr(error) for error in group.exceptions})))
        except Exception as error:  # noqa: BLE001  (whoever asked raises it)
            pipe.send(repr(error))


async def _sent(pipe: Connection, sender: Sender, flows: Sequence[Flow]) -> Run:
    """All of them, or what is sent until somebody says something: that it is enough, or by leaving."""
    loop = asyncio.get_running_loop()

    def deaf() -> None:
        loop.remove_reader(pipe.fileno())
        os.set_blocking(pipe.fileno(), True)  # uvloop has changed that

    def heard() -> None:
        deaf()
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        sender.enough(ENOUGH)

    loop.add_reader(pipe.fileno(), heard)
    try:
        return await sender.run(*flows)
    finally:
        deaf()
