"""Load: what is reported pending, and what the report cannot contain yet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from epd_serve.wire import StageReport
from proxy.registry.instance_state import (
    PER_UNIT,
    REPORT_EVERY_S,
    REPORT_TRUST_S,
    Lease,
    Ledger,
    Tally,
    Work,
    reported_pending,
    reported_rate,
    whole,
)
from proxy.registry.table import InstanceTable
from tests.proxy.fakes import in_flight

P0 = Instance("P0", Role.P, "http://x", "one")
BUSY = StageReport(
    *("P0", "one", 1),
    waiting=2,
    running=3,
    pending_prompt_tokens=400,
    pending_item_tokens=64,
    prompt_tokens_per_s=1000.0,
    item_tokens_per_s=500.0,
)


class Clock:
    """Stands where the table reads the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in ("proxy.registry.table", "proxy.registry.instance_state"):
            monkeypatch.setattr(f"{module}.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def tabled(*instances: Instance) -> InstanceTable:
    table = InstanceTable()
    for instance in instances or (P0,):
        table.apply(instance)
    return table


def load(table: InstanceTable) -> float:
    return table.snapshot()[0].load


def test_every_role_counts_in_its_own_unit() -> None:
    pending = {role: reported_pending(role, BUSY) for role in Role}
    assert pending[Role.E] == 64 and pending[Role.D] == 5
    assert pending[Role.P] == pending[Role.EP] == 400
    assert pending[Role.PD] == pending[Role.EPD] == 403
    assert reported_rate(Role.E, BUSY) == 500 and reported_rate(Role.P, BUSY) == 1000
    assert reported_rate(Role.D, BUSY) == 0


def test_without_a_report_the_load_is_what_is_in_flight() -> None:
    table = tabled()
    lease = table.acquire("P0", Work.PREFILL, 120.5)
    assert load(table) == 120.5
    lease.release()
    assert load(table) == 0


def test_a_report_replaces_what_it_contains_and_later_requests_come_on_top(clock: Clock) -> None:
    table = tabled()
    table.acquire("P0", Work.PREFILL, 100)
    clock.now += 1
    table.report(StageReport("P0", "one", 1, waiting=1, pending_prompt_tokens=90))
    assert load(table) == 90
    table.acquire("P0", Work.PREFILL, 50)
    assert load(table) == 90 + 75  # one of the two in flight is not in the report; they weigh 75 on average
    clock.now += 1
    table.report(StageReport("P0", "one", 2, waiting=2, pending_prompt_tokens=135))
    assert load(table) == 135


def test_what_was_acquired_just_before_a_report_is_not_taken_to_be_in_it(clock: Clock) -> None:
    table = tabled()
    table.acquire("P0", Work.PREFILL, 100)
    clock.now += REPORT_EVERY_S / 2
    table.report(StageReport("P0", "one", 1))
    assert load(table) == 100


def test_of_a_busy_instance_what_it_was_given_between_its_last_two_reports_may_be_in_neither(clock: Clock) -> None:
    table = tabled()
    first = table.acquire("P0", Work.PREFILL, 100)
    clock.now += 1
    table.report(StageReport("P0", "one", 1, running=1, pending_prompt_tokens=90))
    first.release()  # its answer is here, the next report is not
    table.acquire("P0", Work.PREFILL, 50)
    clock.now += REPORT_EVERY_S
    table.report(StageReport("P0", "one", 2, running=1, pending_prompt_tokens=80))
    assert load(table) == 80 + 50, "the one that runs may be either of the two"
    clock.now += REPORT_EVERY_S
    table.report(StageReport("P0", "one", 3, running=1, pending_prompt_tokens=50))
    assert load(table) == 50
    second = table.acquire("P0", Work.PREFILL, 10)
    clock.now += 1  # it computes one long step, and reports when that has ended
    table.report(StageReport("P0", "one", 4, running=2, pending_prompt_tokens=60))
    assert load(table) == 60, "so long after it was given, it is in the report"
    second.release()


def test_a_request_that_the_stage_has_not_counted_yet_stays_a_load_however_long_it_takes(clock: Clock) -> None:
    table = tabled()
    table.acquire("P0", Work.PREFILL, 100)
    for seq in range(1, 10):  # its API server prepares a large image meanwhile
        clock.now += REPORT_EVERY_S * 2
        table.report(StageReport("P0", "one", seq))
        assert load(table) == 100


def test_an_old_report_says_nothing_and_an_overtaken_one_neither(clock: Clock) -> None:
    table = tabled()
    table.report(StageReport("P0", "one", 7, pending_prompt_tokens=10))
    table.report(StageReport("P0", "one", 6, pending_prompt_tokens=99))
    assert load(table) == 10
    table.report(StageReport("P0", "another incarnation", 8, pending_prompt_tokens=99))
    table.report(StageReport("P9", "one", 8, pending_prompt_tokens=99))
    assert load(table) == 10
    clock.now += REPORT_TRUST_S
    assert load(table) == 0


def test_candidates_carry_rate_and_suspension(clock: Clock) -> None:
    table = tabled()
    assert table.live(Role.P)[0].rate == 0 and not table.live(Role.P)[0].suspended
    table.report(BUSY)
    table.suspend("P0", "another incarnation", True)
    assert table.live(Role.P)[0].rate == 1000 and not table.live(Role.P)[0].suspended
    table.suspend("P0", "one", True)
    assert table.live(Role.P)[0].suspended


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.floats(0, 5000)),
        st.tuples(st.just("release"), st.integers(0, 50)),
        st.tuples(st.just("report"), st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9000))),
        st.tuples(st.just("wait"), st.floats(0, 2 * REPORT_TRUST_S)),
    ),
    max_size=40,
)


@given(ACTIONS, st.sampled_from(list(Role)))
def test_whatever_happens_the_load_is_bounded_and_nothing_of_it_leaks(
    actions: list[tuple[str, float]], role: Role
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        table = tabled(Instance("P0", role, "http://x", "one"))
        leases: list[tuple[Lease, float]] = []
        report, reported_at, seq = None, 0.0, 0

        def check() -> None:
            fresh = report if report is not None and clock.now - reported_at < REPORT_TRUST_S else None
            pending = reported_pending(role, fresh) if fresh is not None else 0.0
            held = sum(round(weight * PER_UNIT) for _, weight in leases) / PER_UNIT
            assert pending - 1e-6 <= load(table) <= pending + held + 1e-6
            if fresh is None:
                assert load(table) == pytest.approx(held, abs=1e-6)

        for action, value in actions:
            if action == "acquire":
                leases.append((table.acquire("P0", Work.PREFILL, value), value))
            elif action == "release" and leases:
                leases.pop(int(value) % len(leases))[0].release()
            elif action == "report":
                seq += 1
                waiting, running, tokens = value  # type: ignore[misc]
                report, reported_at = StageReport("P0", "one", seq, waiting, running, tokens, tokens), clock.now
                table.report(report)
            elif action == "wait":
                clock.now += value
            check()
        while leases:
            leases.pop()[0].release()
            check()
        clock.now += REPORT_TRUST_S
        assert load(table) == 0 and in_flight(table) == 0


# --- counts of leases: exact, never lost, apart by incarnation --------------------------------------------------

LIFE, OTHER = ("P0", "one"), ("P1", "one")
LEASES = st.lists(
    st.tuples(st.sampled_from([LIFE, OTHER]), st.sampled_from(list(Work)), st.integers(0, 10**9)), max_size=20
)


@given(LEASES, st.data())
def test_what_is_held_is_what_was_acquired_and_not_released(
    leases: list[tuple[IncarnationId, Work, int]], data: st.DataObject
) -> None:
    ledger = Ledger()
    for lease in leases:
        ledger.acquire(*lease)
    order = data.draw(st.permutations(range(len(leases))))
    ended = set(order[: data.draw(st.integers(0, len(leases)))])
    for index in ended:
        ledger.release(*leases[index])
    for incarnation in (LIFE, OTHER):
        for work in Work:
            held = [one[2] for index, one in enumerate(leases) if one[:2] == (incarnation, work) and index not in ended]
            tally = ledger.tallies(incarnation)[work]
            assert (tally.held, tally.held_weight) == (len(held), sum(held))
        assert ledger.total(incarnation) == whole(ledger.tallies(incarnation)), "but for what is counted aside"


WEIGHTS = st.dictionaries(st.sampled_from(list(Work)), st.floats(0, 1e6), min_size=1)


@given(st.lists(st.tuples(WEIGHTS, st.lists(st.sampled_from([*Work, None]), max_size=8)), max_size=8))
def test_each_part_of_a_lease_is_released_exactly_once_in_whatever_order(
    leases: list[tuple[dict[Work, float], list[Work | None]]],
) -> None:
    """None: all of it."""
    ledger = Ledger()
    for weights, ends in leases:
        lease, left = Lease(ledger, P0, weights), {work: round(weight * PER_UNIT) for work, weight in weights.items()}
        others = {work: ledger.tallies(LIFE)[work].held_weight - left.get(work, 0) for work in Work}
        for work in ends:
            if work is None:
                lease.release()
                left.clear()
            else:
                lease.over(work)
                left.pop(work, None)
            for one in Work:
                assert ledger.tallies(LIFE)[one].held_weight == others[one] + left.get(one, 0)
        lease.release()
        with lease:
            pass
    tallies = ledger.tallies(LIFE)
    for work in Work:
        tally, count = tallies[work], sum(work in weights for weights, _ in leases)
        assert (tally.acquired, tally.released, tally.held_weight) == (count, count, 0)


def test_what_is_counted_aside_is_no_work_of_its_own() -> None:
    table = tabled()
    lease = table.acquire("P0", Work.PREFILL, 100.0, {Work.AHEAD: 100.0, Work.KV: 700.0})
    [view] = table.snapshot()
    assert (view.load, view.given, view.in_flight) == (100.0, 100.0, {Work.ENCODE: 0, Work.PREFILL: 1, Work.DECODE: 0})
    assert table.live(Role.P)[0].load == 100.0
    with lease:
        lease.over(Work.AHEAD)
        assert load(table) == 100.0
    assert load(table) == 0.0 and not table._ledger.tallies(LIFE)[Work.KV].held


def test_counts_only_grow_so_that_processes_can_share_them() -> None:
    ledger = Ledger()
    ledger.acquire(LIFE, Work.PREFILL, 5)
    ledger.release(LIFE, Work.PREFILL, 5)
    ledger.acquire(LIFE, Work.PREFILL, 7)
    assert ledger.tallies(LIFE)[Work.PREFILL] == Tally(2, 1, 12, 5)
    assert ledger.tallies(LIFE)[Work.DECODE] == Tally() == ledger.tallies(OTHER)[Work.PREFILL]


def test_releasing_what_was_not_acquired_is_a_bug() -> None:
    ledger = Ledger()
    ledger.acquire(LIFE, Work.PREFILL, 5)
    with pytest.raises(AssertionError, match="released more"):
        ledger.release(LIFE, Work.DECODE, 5)


def test_a_forgotten_incarnation_has_held_nothing() -> None:
    ledger = Ledger()
    ledger.acquire(LIFE, Work.DECODE, 5)
    ledger.release(LIFE, Work.DECODE, 5)
    ledger.forget(LIFE)
    ledger.forget(LIFE)
    assert all(tally == Tally() for tally in ledger.tallies(LIFE).values())
