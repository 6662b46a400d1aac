"""The status table: lives, leases, waiting."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.life import Work
from proxy.table import InstanceTable

P0 = Instance("P0", Role.P, "http://x", "one")


def test_an_instance_is_up_once_applied_and_down_until_its_next_life() -> None:
    table = InstanceTable()
    table.apply(P0)
    assert table.live_roles() == {Role.P}
    table.mark_down("P0", "killed by signal 9")
    table.apply(P0)
    assert table.missing() == (Role.P,) and table.snapshot()[0].reason == "killed by signal 9"
    table.apply(replace(P0, incarnation="two"))
    assert not table.missing() and table.snapshot()[0].reason == ""
    table.mark_down("P0", "late word", incarnation="one")
    assert not table.missing()
    table.mark_down("P0", "hung")
    table.mark_up("P0")
    assert not table.missing()


def test_an_instance_that_starts_is_known_but_missing() -> None:
    table = InstanceTable()
    table.apply(P0, up=False)
    assert table.roles() == {Role.P} and table.missing((Role.P, Role.D)) == (Role.D, Role.P)
    table.mark_up("P0")
    assert table.missing((Role.P, Role.D)) == (Role.D,)
    table.remove("P0")
    assert table.roles() == frozenset()


def test_leases_count_on_the_life_they_were_taken_on_and_are_released_once() -> None:
    table = InstanceTable()
    table.apply(P0)
    first, second = table.acquire("P0", Work.PREFILL, 3.0), table.acquire("P0", Work.DECODE)
    assert table.live(Role.P)[0].load == 4.0 and table.total_in_flight() == 2
    table.apply(replace(P0, incarnation="two"))
    assert table.live(Role.P)[0].load == 0.0 and table.total_in_flight() == 2
    first.release()
    first.release()
    assert table.total_in_flight() == 1 and table.live(Role.P)[0].load == 0.0
    with second as instance:
        assert instance.incarnation == "one"
    assert table.total_in_flight() == 0


async def test_waiters_wake_on_change_and_give_up_at_their_deadline() -> None:
    table = InstanceTable()
    waiting = [asyncio.create_task(table.changed(5)) for _ in range(3)]
    await asyncio.sleep(0)
    table.apply(P0)
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert await table.changed(0.01) is False
    assert await table.changed(-1) is False
