"""The status table: incarnations, leases, waiting."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import StageReport, StoreReport
from proxy.registry.instance_state import Ledger, Work
from proxy.registry.table import InstanceTable, Pause
from proxy.routing.policy import UNMEASURED_RATE
from tests.proxy.fakes import in_flight

P0 = Instance("P0", Role.P, "http://x", "one")


def test_an_instance_is_up_once_applied_and_down_until_its_next_incarnation() -> None:
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


def test_whatever_an_instance_announces_is_listened_to_until_it_is_gone() -> None:
    table = InstanceTable()
    table.apply(replace(P0, events="ipc:///e", load_news="ipc:///l", kv_news=("ipc:///k",)), up=False)
    assert table.announcement_addresses() == {"ipc:///e", "ipc:///l", "ipc:///k"}
    assert table.event_addresses() == {"ipc:///e"}
    table.remove("P0")
    assert not table.announcement_addresses()


def test_what_an_instance_is_given_adds_up_in_each_of_its_lives() -> None:
    table = InstanceTable()
    table.apply(P0)
    for weight in (100.5, 200.0):
        table.acquire("P0", Work.PREFILL, weight).release()
    table.acquire("P0", Work.DECODE)
    (view,) = table.snapshot()
    assert (view.given, view.load) == (301.5, 1.0)
    table.apply(replace(P0, incarnation="two"))
    assert table.snapshot()[0].given == 0


def test_an_instance_that_starts_is_known_but_missing() -> None:
    table = InstanceTable()
    table.apply(P0, up=False)
    assert table.wanted == {Role.P} and table.missing() == (Role.P,)
    table.want((Role.P, Role.D))
    assert table.missing() == (Role.D, Role.P)
    table.mark_up("P0")
    assert table.missing() == (Role.D,)
    table.remove("P0")
    assert table.wanted == {Role.P, Role.D}


def held(ledger: Ledger) -> int:
    """Leases on the first incarnation of P0."""
    return sum(tally.held for tally in ledger.tallies(P0.incarnation_id).values())


def test_leases_count_on_the_incarnation_they_were_taken_on_and_are_released_once() -> None:
    table = InstanceTable(ledger=(ledger := Ledger()))
    table.apply(P0)
    first, second = table.acquire("P0", Work.PREFILL, 3.0), table.acquire("P0", Work.DECODE)
    assert table.live(Role.P)[0].load == 4.0 and held(ledger) == 2
    table.apply(replace(P0, incarnation="two"))
    assert table.live(Role.P)[0].load == 0.0 and held(ledger) == 2
    first.release()
    first.release()
    assert table.live(Role.P)[0].load == 0.0 and held(ledger) == 1
    with second as instance:
        assert instance.incarnation == "one"
    assert held(ledger) == 0


async def test_waiters_wake_on_change_and_give_up_at_their_deadline() -> None:
    table = InstanceTable()
    waiting = [asyncio.create_task(table.changed(5)) for _ in range(3)]
    await asyncio.sleep(0)
    table.apply(P0)
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert await table.changed(0.01) is False
    assert await table.changed(-1) is False


def test_an_incarnation_that_comes_back_is_counted_once() -> None:
    table = InstanceTable(ledger=(ledger := Ledger()))
    table.apply(P0)
    lease = table.acquire("P0", Work.PREFILL)
    table.remove("P0")
    assert held(ledger) == 1
    table.apply(P0)
    assert in_flight(table) == held(ledger) == 1
    lease.release()
    assert in_flight(table) == held(ledger) == 0


class Silences:
    """Two instances that report, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("proxy.registry.table.time.monotonic", lambda: self.now)
        self.table = InstanceTable(silence_s=5.0)
        for name in ("P0", "P1"):
            self.table.apply(Instance(name, Role.P, "http://x", "one"))
        self._seq = 0

    def report(self, *names: str) -> None:
        self._seq += 1
        for name in names:
            self.table.report(StageReport(name, "one", self._seq))

    def for_s(self, seconds: float, *names: str) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            self.report(*names)

    @property
    def live(self) -> list[str]:
        return [candidate.id for candidate in self.table.live(Role.P)]


@pytest.fixture
def silences(monkeypatch: pytest.MonkeyPatch) -> Silences:
    return Silences(monkeypatch)


def test_one_that_stops_to_report_leaves_and_returns_with_its_next_report(silences: Silences) -> None:
    silences.for_s(1, "P0", "P1")
    silences.for_s(4, "P0")
    assert silences.live == ["P0", "P1"]
    silences.for_s(3, "P0")
    assert silences.live == ["P0"]
    assert not silences.table.snapshot()[1].up and "silent" in silences.table.snapshot()[1].reason
    silences.table.mark_up("P1")  # its port still answers
    assert silences.live == ["P0"]
    silences.report("P1")
    assert silences.live == ["P0", "P1"]


def test_one_that_never_reported_is_not_silent(silences: Silences) -> None:
    silences.for_s(20, "P0")
    assert silences.live == ["P0", "P1"]


def test_when_nobody_is_heard_it_is_this_end_that_is_deaf(silences: Silences) -> None:
    silences.report("P0", "P1")
    silences.now += 60
    silences.report("P0")
    assert silences.live == ["P0", "P1"]
    silences.for_s(6, "P0")
    assert silences.live == ["P0"]


def test_a_pause_of_this_end_condemns_nobody_whatever_is_heard_first_after_it(silences: Silences) -> None:
    silences.report("P0", "P1")
    silences.now += 60
    silences.table.report(StoreReport("P0", "one", 1000, 0, 0))
    silences.report("P0")
    assert silences.table.silence_s("P1", "one") == 0.0
    assert silences.live == ["P0", "P1"]
    silences.for_s(6, "P0")
    assert silences.table.silence_s("P1", "one") == 6.0


def test_a_new_incarnation_is_not_silent(silences: Silences) -> None:
    silences.report("P0", "P1")
    silences.for_s(7, "P0")
    assert silences.live == ["P0"]
    silences.table.apply(Instance("P1", Role.P, "http://x", "two"))
    assert silences.live == ["P0", "P1"]


async def test_those_who_wait_hear_of_silence_and_of_its_end(silences: Silences) -> None:
    silences.report("P0", "P1")
    waiting = asyncio.create_task(silences.table.changed(5))
    await asyncio.sleep(0)
    silences.for_s(7, "P0")
    assert await waiting
    waiting = asyncio.create_task(silences.table.changed(5))
    await asyncio.sleep(0)
    silences.report("P1")
    assert await waiting


def shared() -> InstanceTable:
    """E0 and PD0 on one device, PD1 on another one; E0 encodes 100 tokens a second."""
    table = InstanceTable()
    for name, role, place in (("E0", Role.E, 0), ("PD0", Role.PD, 0), ("PD1", Role.PD, 1)):
        table.apply(Instance(name, role, f"http://127.0.0.1:{place}", "one", devices=(place,)))
    table.report(StageReport("E0", "one", 1, item_tokens_per_s=100.0))
    return table


def neighbours_s(table: InstanceTable, role: Role) -> dict[str, tuple[float, ...]]:
    return {candidate.id: candidate.neighbours_s for candidate in table.live(role)}


def test_a_candidate_knows_the_pending_seconds_of_those_on_its_device() -> None:
    table = shared()
    with table.acquire("E0", Work.ENCODE, 50):
        assert neighbours_s(table, Role.PD) == {"PD0": (0.5,), "PD1": ()}
    assert neighbours_s(table, Role.PD) == {"PD0": (0.0,), "PD1": ()}
    with table.acquire("PD0", Work.DECODE, 30):
        assert neighbours_s(table, Role.E) == {"E0": (pytest.approx(30 / UNMEASURED_RATE),)}
        table.report(StageReport("PD1", "one", 1, prompt_tokens_per_s=10.0))
        assert neighbours_s(table, Role.E) == {"E0": (3.0,)}, "of unknown speed, so the usual one"


def test_a_neighbour_that_decodes_is_busy_for_as_long_as_anybody_knows() -> None:
    table = shared()
    table.report(StageReport("PD0", "one", 1, running=1))
    assert neighbours_s(table, Role.E) == {"E0": (math.inf,)}
    table.report(StageReport("PD0", "one", 2))
    assert neighbours_s(table, Role.E) == {"E0": (0.0,)}


def test_neighbours_come_and_go() -> None:
    table = shared()
    table.mark_down("PD0", "killed")
    with table.acquire("PD0", Work.DECODE, 30):
        assert neighbours_s(table, Role.E) == {"E0": (0.0,)}
    table.remove("PD0")
    assert neighbours_s(table, Role.E) == {"E0": ()}
    table.apply(Instance("D0", Role.D, "http://127.0.0.1:9", "one", devices=(0, 1)))
    assert neighbours_s(table, Role.D) == {"D0": (0.0, 0.0)}


@pytest.mark.parametrize(
    ("more", "together"),
    [
        ({}, True),
        ({"devices": (1, 0)}, True),
        ({"devices": (1,)}, False),
        ({"node": "b"}, False),  # device 0 of another node
        ({"core_share": 0.5}, False),  # cores of its own
        ({"cpu_cores": (4, 5)}, False),
    ],
)
def test_who_computes_where(more: dict[str, Any], together: bool) -> None:
    one = Instance("E0", Role.E, "http://10.0.0.1:1", "one", devices=(0,))
    assert bool(one.computes_on & replace(one, id="PD0", **more).computes_on) is together


def test_virtual_devices_on_one_core_are_one_place() -> None:
    one = Instance("E0", Role.E, "http://10.0.0.1:1", "one", devices=(0,), cpu_cores=(3,))
    assert one.computes_on == replace(one, id="D0", devices=(2,)).computes_on


def test_who_drains_is_given_nothing_new_and_is_there_until_it_has_ended() -> None:
    table = InstanceTable()
    for one in (P0, replace(P0, id="P1")):
        table.apply(one)
    lease = table.acquire("P0", Work.PREFILL, 3.0)
    table.drain("P0")
    assert [one.id for one in table.live(Role.P)] == ["P1"]
    assert table.is_alive("P0", P0.incarnation), "what it works on is not lost"
    view = table.snapshot()[0]
    assert (view.up, view.draining, view.reason, view.load) == (False, True, "draining", 3.0)
    table.drain("P1")
    assert table.missing() == (Role.P,) and table.live(Role.P) == ()
    table.drain("P0", False)
    assert [one.id for one in table.live(Role.P)] == ["P0"] and table.snapshot()[0].reason == ""
    lease.release()


def test_the_next_life_of_one_that_drained_does_not_drain() -> None:
    table = InstanceTable()
    table.apply(P0)
    table.drain("P0")
    table.apply(replace(P0, role=Role.P), up=True)
    assert table.live(Role.P) == ()
    table.apply(replace(P0, incarnation="another"))
    assert len(table.live(Role.P)) == 1


# --- the clock of those who wait while new requests are paused --------------------------------------------------------

STEPS = st.lists(st.tuples(st.floats(0, 10), st.one_of(st.none(), st.floats(0, 10))), max_size=8)


@given(STEPS)
def test_time_passes_only_outside_of_pauses(steps: list[tuple[float, float | None]]) -> None:
    now = 100.0
    pause = Pause(lambda: now)
    expected, until = pause.now(), now
    for passed_s, paused_s in steps:
        expected += max(0.0, passed_s - max(0.0, until - now))
        now += passed_s
        assert abs(pause.now() - expected) < 1e-6
        assert abs(pause.left_s - max(0.0, until - now)) < 1e-6
        if paused_s is not None:
            pause.begin(paused_s)
            until = now + paused_s
            assert abs(pause.now() - expected) < 1e-6, "it neither jumps nor goes back"
