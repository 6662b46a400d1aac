"""The request sender in a process of its own, so that it shares no interpreter with what is measured, nor with who
measures. A run may go on while the measurement does other things: `start`, then `finish`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from bench.children import Child, answering, commands
from bench.clients.records import LIMIT_S, RequestRecord
from bench.clients.sender import Bounds, Flow, Run, send
from bench.clients.target import Request
from epd_serve.errors import StageError

MARGIN_S = 60.0
"""Over the time that the slowest request may take."""


class SenderProcess:
    """A sender process. Use as a context manager; leaving it ends what is still being sent."""

    def __init__(self) -> None:
        self._child = Child("bench.clients.process", {})
        self._ends_s = 0.0

    def __enter__(self) -> SenderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()

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
        self._child.tell(url=url, flows=[_plain(flow) for flow in flows], limit_s=limit_s, decode=decode)

    def finish(self) -> Run:
        """Wait until every request has ended. Raises StageError where that takes too long, or the process failed."""
        heard = self._child.hear(self._ends_s)
        if "failed" in heard:
            raise StageError(heard["failed"], stage="load")
        return Run(**{**heard, "rows": [RequestRecord.from_json(row) for row in heard["rows"]]})


def _plain(flow: Flow) -> dict[str, Any]:
    requests = [asdict(replace(one, body=b"")) | {"body": str(one.body, "utf-8")} for one in flow.requests]
    return asdict(replace(flow, requests=[Request(b"")])) | {"requests": requests}


def _flow(plain: dict[str, Any]) -> Flow:
    requests = [Request(**{**one, "body": one["body"].encode()}) for one in plain["requests"]]
    return Flow(**{**plain, "requests": requests})


def main() -> None:
    answer = answering()
    lines = commands()
    next(lines)  # no configuration
    for order in lines:
        flows = [_flow(plain) for plain in order["flows"]]
        try:
            run = send(order["url"], *flows, bounds=Bounds(order["limit_s"]), decode=order["decode"], realtime=False)
        except BaseExceptionGroup as group:
            answer(failed="; ".join(sorted({repr(error) for error in group.exceptions})))
            continue
        answer(**{**vars(run), "rows": [row.to_json() for row in run.rows]})


if __name__ == "__main__":
    main()
