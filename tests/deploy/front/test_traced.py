"""How far apart the clocks of hosts are, and which stamps belong to a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.front.traced import ROUND_TRIPS, NodeTrace, about_requests, offset_s
from epd_serve.phases.stamps import Stamp


@given(
    ahead_s=st.floats(-1e6, 1e6),
    ways=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=ROUND_TRIPS, max_size=ROUND_TRIPS),
)
def test_the_true_distance_is_within_what_is_said_however_the_ways_differ(
    ahead_s: float, ways: list[tuple[float, float]]
) -> None:
    now, trips = 1000.0, iter(ways)

    async def theirs() -> float:
        nonlocal now
        there, back = next(trips)
        now += there
        told = now - ahead_s
        now += back
        return told

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deploy.front.traced.time", SimpleNamespace(monotonic=lambda: now))
        apart_s, uncertainty_s = asyncio.run(offset_s(theirs))
    assert abs(apart_s - ahead_s) <= uncertainty_s + 1e-6
    assert uncertainty_s == pytest.approx(min(map(sum, ways)) / 2, abs=1e-6)


async def test_a_clock_of_this_host_is_no_distance_away() -> None:
    async def theirs() -> float:
        return time.monotonic()

    apart_s, uncertainty_s = await offset_s(theirs)
    assert abs(apart_s) <= uncertainty_s + 1e-9 < 0.1


async def test_stamps_of_items_and_transfers_are_found_by_those_of_the_front_door() -> None:
    made = {
        "n1": [
            Stamp(1.0, "proxy", "r", "media", {"keys": ["k"]}),
            Stamp(2.0, "proxy", "r", "dispatched", {"transfer": "t"}),
        ],
        "n2": [
            Stamp(1.5, "E0", "k", "encoded", {}),
            Stamp(2.5, "P0", "packet", "kv_packet", {"transfers": ["t", "u"]}),
        ],
    }

    async def of_nodes(subjects: Sequence[str]) -> list[NodeTrace]:
        return [
            NodeTrace(node, stamps=[one for one in stamps if set(subjects) & set(one.subjects)])
            for node, stamps in made.items()
        ]

    one, other = await about_requests(of_nodes, ["r"])
    assert (list(one.stamps), list(other.stamps)) == (made["n1"], made["n2"])
    assert [list(node.stamps) for node in await about_requests(of_nodes, ["nobody"])] == [[], []]
