"""A run of the load generator as data: what bounds it, and what it has seen so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.client.row import Row


@dataclass(frozen=True, slots=True)
class Bounds:
    """What keeps a run finite.

    Attributes:
        limit_s: how long one request may take.
        at_once: requests under way; one more is not sent, and that is its error.
        gone_after: so many in a row that could not reach the endpoint, over `gone_s` or longer, end the run.
    """

    limit_s: float = 600.0
    at_once: int = 4096
    gone_after: int = 20
    gone_s: float = 5.0


@dataclass
class Run:
    """A run so far, and in the end.

    Attributes:
        begun_s: its start (CLOCK_MONOTONIC). issued_s: when the last request was due. ended_s: when the last ended.
        rows: in the order in which they ended. cpu_s: the generator's own CPU time.
        under_way: requests now. stopped: why it ended early; "" where it did not. goes_first: `ahead`.
    """

    label: str
    begun_s: float = 0.0
    issued_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0
    sent: int = 0
    under_way: int = 0
    stopped: str = ""
    goes_first: bool = False
    rows: list[Row] = field(default_factory=list)
