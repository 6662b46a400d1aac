"""Load: what is reported pending, and what the report cannot contain yet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import StageReport
from proxy.registry.instance_state import REPORT_TRUST_S, Lease
from proxy.registry.ledger import PER_UNIT, Work
from proxy.registry.load import REPORT_LAG_S, STEP_S, Acquired, reported_pending, reported_rate
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
    table.report_stage(StageReport("P0", "one", 1, waiting=1, pending_prompt_tokens=90))
    assert load(table) == 90
    table.acquire("P0", Work.PREFILL, 50)
    assert load(table) == 90 + 75  # one of the two in flight is not in the report; they weigh 75 on average
    clock.now += 1
    table.report_stage(StageReport("P0", "one", 2, waiting=2, pending_prompt_tokens=135))
    assert load(table) == 135


def test_what_was_acquired_just_before_a_report_is_not_taken_to_be_in_it(clock: Clock) -> None:
    table = tabled()
    table.acquire("P0", Work.PREFILL, 100)
    clock.now += REPORT_LAG_S / 2
    table.report_stage(StageReport("P0", "one", 1))
    assert load(table) == 100


def test_a_request_that_the_stage_has_not_counted_yet_stays_a_load_however_long_it_takes(clock: Clock) -> None:
    table = tabled()
    table.acquire("P0", Work.PREFILL, 100)
    for seq in range(1, 10):  # its API server prepares a large image meanwhile
        clock.now += REPORT_LAG_S * 2
        table.report_stage(StageReport("P0", "one", seq))
        assert load(table) == 100


def test_an_old_report_says_nothing_and_an_overtaken_one_neither(clock: Clock) -> None:
    table = tabled()
    table.report_stage(StageReport("P0", "one", 7, pending_prompt_tokens=10))
    table.report_stage(StageReport("P0", "one", 6, pending_prompt_tokens=99))
    assert load(table) == 10
    table.report_stage(StageReport("P0", "another incarnation", 8, pending_prompt_tokens=99))
    table.report_stage(StageReport("P9", "one", 8, pending_prompt_tokens=99))
    assert load(table) == 10
    clock.now += REPORT_TRUST_S
    assert load(table) == 0


def test_candidates_carry_rate_and_suspension(clock: Clock) -> None:
    table = tabled()
    assert table.live(Role.P)[0].rate == 0 and not table.live(Role.P)[0].suspended
    table.report_stage(BUSY)
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
                table.report_stage(report)
            elif action == "wait":
                clock.now += value
            check()
        while leases:
            leases.pop()[0].release()
            check()
        clock.now += REPORT_TRUST_S
        assert load(table) == 0 and in_flight(table) == 0


@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(0, 100)), max_size=200))
def test_the_past_is_remembered_to_a_step_and_in_bounded_space(gains: list[tuple[float, int]]) -> None:
    acquired, now, total = Acquired(), 1000.0, 0
    history = [(now, total)]
    for pause, gain in gains:
        now, total = now + pause, total + gain
        history.append((now, total))
        acquired.note(now, total)
        then = now - REPORT_LAG_S
        exact = max((one for when, one in history if when <= then), default=0)
        earlier = max((one for when, one in history if when <= then - 2 * STEP_S), default=0)
        assert earlier <= acquired.before(now) <= exact
        assert len(acquired._samples) <= REPORT_LAG_S / STEP_S + 4
