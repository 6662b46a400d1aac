"""What has been stamped about requests (`--trace-dir`), node by node, with what each node's clock says of ours.

Stamps are made by CLOCK_MONOTONIC, which the processes of one host share and hosts do not. So a node is asked for its
time a few times: the answer that took least says best how far apart the two clocks are, within half of what it took.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from epd_serve.phases.stamps import Stamp

ROUND_TRIPS = 8


class NodeTrace(msgspec.Struct, frozen=True):
    """Of one node.

    Attributes:
        node: "" where the deployment is on this machine alone.
        offset_s: what makes of its monotonic time that of whoever controls the deployment, added to it.
        uncertainty_s: by how much that may be wrong.
        stamps: by its own clock, oldest first.
    """

    node: str = ""
    offset_s: float = 0.0
    uncertainty_s: float = 0.0
    stamps: Sequence[Stamp] = ()


Traced = Callable[[Sequence[str]], Awaitable[list[NodeTrace]]]
"""Asks every node for what is stamped there about some subjects."""


async def offset_s(their_time_s: Callable[[], Awaitable[float]]) -> tuple[float, float]:
    """How far our monotonic clock is ahead of theirs, and by how much that may be wrong."""
    best = (0.0, float("inf"))
    for _ in range(ROUND_TRIPS):
        asked = time.monotonic()
        theirs = await their_time_s()
        answered = time.monotonic()
        if (half := (answered - asked) / 2) < best[1]:
            best = (asked + half - theirs, half)
    return best


async def about_requests(traced: Traced, ids: Iterable[str]) -> list[NodeTrace]:
    """All that is stamped about these requests: under their ids, and under those of their items and transfers, which
    the front doors' stamps name."""
    subjects = list(ids)
    named = [one for node in await traced(subjects) for stamp in node.stamps for one in stamp.leads_to]
    return await traced(list(dict.fromkeys([*subjects, *named])))
