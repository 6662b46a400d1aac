"""The request sender in a process of its own, so that it shares no interpreter with what is measured, nor with who
measures. A run may go on while the measurement does other things: `start`, then `finish`.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from bench.children import Child
from bench.clients.results import LIMIT_S
from bench.clients.sender import Bounds, Flow, Run, send
from epd_serve.errors import StageError

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
        self, url: str, *flows: Flow, within_s: float = 0.0, limit_s: float = LIMIT_S, decode: bool = False
    ) -> None:
        """Begin to send.

        Args:
            within_s: how long flows with a `count` alone may take. limit_s: the same of one request.
            decode: reads every token, of the text nothing is kept; else first byte, end and outcome alone.
        """
        last_s = max(max(flow.dues or (0.0,)) + (flow.duration_s or 0.0) for flow in flows)
        self._ends_s = max(last_s, within_s) + limit_s + MARGIN_S
        self.tell((url, flows, {"bounds": Bounds(limit_s), "decode": decode, "realtime": False}))

    def finish(self) -> Run:
        """Wait until every request has ended. Raises StageError where that takes too long, or the process failed."""
        found = self.hear(self._ends_s)
        if not isinstance(found, Run):
            raise StageError(f"the load failed: {found}", stage="load")
        return found


def main(pipe: Connection) -> None:
    """In the process: send what comes, until nobody is there who asks."""
    for url, flows, options in iter(pipe.recv, None):
        try:
            pipe.send(send(url, *flows, **options))
        except BaseExceptionGroup as group:
            pipe.send("; ".join(sorted({repr(error) for error in group.exceptions})))
        except Exception as error:  # noqa: BLE001  (whoever asked raises it)
            pipe.send(repr(error))
