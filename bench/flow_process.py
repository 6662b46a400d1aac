"""Flows sent by a process of its own, so that it shares no interpreter with what is measured, nor with who measures.

`FlowGenerator` is the measurement's end, `main` the process. A run may go on while the measurement does other things:
`start`, then `finish`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple

from bench.children import Child, answering, commands
from bench.flows import Flow, Outcome, Run, run_flows
from bench.load import LIMIT_S
from deploy import event_loop
from epd_serve.errors import StageError

MARGIN_S = 60.0
"""Over the time that the slowest request may take."""


class FlowGenerator:
    """A generator process. Use as a context manager; leaving it ends what is still being sent."""

    def __init__(self) -> None:
        self._child = Child("bench.flow_process", {})
        self._ends_s = 0.0

    def __enter__(self) -> FlowGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()

    def run(self, url: str, flows: Sequence[Flow], *, within_s: float = 0.0, limit_s: float = LIMIT_S) -> Run:
        """`start`, then `finish`."""
        self.start(url, flows, within_s=within_s, limit_s=limit_s)
        return self.finish()

    def start(self, url: str, flows: Sequence[Flow], *, within_s: float = 0.0, limit_s: float = LIMIT_S) -> None:
        """Begin to send.

        Args:
            within_s: how long flows without `dues` may take. limit_s: the same of one request.
        """
        last = max((due for flow in flows for due in flow.dues), default=0.0)
        self._ends_s = max(last, within_s) + limit_s + MARGIN_S
        self._child.tell(url=url, flows=[asdict(flow) for flow in flows], limit_s=limit_s)

    def finish(self) -> Run:
        """Wait until every request has ended. Raises StageError where that takes too long, or the process failed."""
        found = self._child.hear(self._ends_s)
        if "failed" in found:
            raise StageError(found["failed"], stage="load")
        return Run(found["begun_s"], [Outcome(*one) for one in found["outcomes"]])


def main() -> None:
    answer = answering()
    lines = commands()
    next(lines)  # no configuration
    for order in lines:
        try:
            run = event_loop.run(run_flows(order["url"], [Flow(**flow) for flow in order["flows"]], order["limit_s"]))
        except BaseExceptionGroup as group:
            answer(failed="; ".join(sorted({repr(error) for error in group.exceptions})))
            continue
        answer(begun_s=run.begun_s, outcomes=[astuple(outcome) for outcome in run.outcomes])


if __name__ == "__main__":
    main()
