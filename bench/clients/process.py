"""The request sender in a process of its own, so that it shares no interpreter with what is measured, nor with who
measures. A run may go on while the measurement does other things: `start`, then `finish`.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection

from bench.clients.records import LIMIT_S
from bench.clients.sender import Bounds, Flow, Run, send
from epd_serve.errors import StageError

MARGIN_S = 60.0
"""Over the time that the slowest request may take."""


class SenderProcess:
    """A sender process. Use as a context manager; leaving it ends what is still being sent."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._ends_s = 0.0

    def __enter__(self) -> SenderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def run(self, url: str, *flows: Flow, within_s: float = 0.0, limit_s: float = LIMIT_S, decode: bool = False) -> Run:
        """`start`, then `finish`."""
        self.start(url, *flows, within_s=within_s, limit_s=limit_s, decode=decode)
        return self.finish()

    def start(
        self, url: str, *flows: Flow, within_s: float = 0.0, limit_s: float = LIMIT_S, decode: bool = False
    ) -> None:
        """Begin to send.

        Args:
            within_s: how long flows with a `count` alone may take. limit_s: the same of one request.
            decode: reads every token, of the text nothing is kept; else first byte, end and outcome alone.
        """
        last_s = max(max(flow.dues or (0.0,)) + (flow.duration_s or 0.0) for flow in flows)
        self._ends_s = max(last_s, within_s) + limit_s + MARGIN_S
        self._pipe.send((url, flows, {"bounds": Bounds(limit_s), "decode": decode, "realtime": False}))

    def finish(self) -> Run:
        """Wait until every request has ended. Raises StageError where that takes too long, or the process failed."""
        try:
            found = self._pipe.recv() if self._pipe.poll(self._ends_s) else f"no end within {self._ends_s:.0f} s"
        except EOFError:
            found = "the sender's process has ended"
        if not isinstance(found, Run):
            raise StageError(f"the load failed: {found}", stage="load")
        return found


def _serve(pipe: Connection) -> None:
    """In the process: send what comes, until nobody is there who asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who measures ends this one
    while True:
        try:
            url, flows, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(send(url, *flows, **options))
        except BaseExceptionGroup as group:
            pipe.send("; ".join(sorted({repr(error) for error in group.exceptions})))
        except Exception as error:  # noqa: BLE001  (whoever asked raises it)
            pipe.send(repr(error))
