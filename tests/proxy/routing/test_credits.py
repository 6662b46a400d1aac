"""How much more may be given to each instance: by its own seconds, sequences and KV, and never by sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.wire import StageReport
from proxy.config.limits import AdmissionLimits
from proxy.registry.instance_state import Work
from proxy.registry.table import InstanceTable
from proxy.routing.credits import (
    KV_FULL,
    Credit,
    Need,
    Speeds,
    encoders_with_room,
    heads_with_room,
    kv_room,
    seats,
)
from proxy.routing.policy import UNMEASURED_RATE

LIMITS = AdmissionLimits(encode_s=0.5, prefill_s=0.5, prefill_tokens=1000)
"""An instance that has 10,000 tokens a second has credit for 5,000, an unmeasured one for 1,000."""


def of(*instances: Credit) -> Callable[[Role], Sequence[Credit]]:
    return lambda role: [one for one in instances if one.role is role]


MANY = 99
"""More than there are; of nobody at all it is the answer."""


def heads(*instances: Credit, tokens: float = 100.0, enough: int = MANY, **need: object) -> int:
    there = of(*instances)
    speeds = Speeds.measured(there, LIMITS)
    return heads_with_room(there, Need(tokens, **need), LIMITS, speeds, enough)  # type: ignore[arg-type]


def encoders(*instances: Credit, enough: int = MANY) -> int:
    there = of(*instances)
    return encoders_with_room(there, Need(items=(10.0, 400.0)), LIMITS, Speeds.measured(there, LIMITS), enough)


def p(pending: float = 0.0, rate: float = 10_000.0, *, role: Role = Role.P, **more: float) -> Credit:
    return Credit(role, pending, rate, **{"requests": bool(pending), **more})  # type: ignore[arg-type]


def d(**more: float) -> Credit:
    return Credit(Role.D, **more)  # type: ignore[arg-type]


def pd(pending: float = 0.0, rate: float = 10_000.0, **more: float) -> Credit:
    return p(pending, rate, role=Role.PD, **more)


# --- seconds of its own work -----------------------------------------------------------------------------------------


def test_one_long_prompt_fills_the_instance_that_has_it_and_no_other() -> None:
    """Pooled, 32,000 tokens were more than what four may have together, and three of them idled."""
    assert heads(p(32_000), p(), p(), p(), d()) == 3
    assert heads(p(32_000), p(5000), p(5001), p(), d()) == 2


def test_it_may_be_given_a_prompt_of_any_length_while_what_is_before_that_is_little() -> None:
    assert heads(p(4999), d(), tokens=1e6) == 1


def test_each_goes_by_its_own_speed() -> None:
    assert heads(p(3000, rate=10_000), p(3000, rate=1000), d()) == 1
    assert heads(p(400, rate=10_000), p(400, rate=1000), d()) == 2


def test_an_unmeasured_one_is_as_fast_as_the_others_or_as_the_settings_say() -> None:
    assert heads(p(5000, rate=0), p(9000), d()) == 1
    assert heads(p(5001, rate=0), p(9000), d()) == 0
    assert heads(p(1000, rate=0), d()) == 1
    assert heads(p(1001, rate=0), d()) == 0


def test_where_requests_share_steps_a_short_prompt_waits_for_no_long_one() -> None:
    """Of a step of 2,048 tokens each of four has its part: 500 fit, 600 do not, however long the others are."""
    busy = p(100_000, shared_tokens=2048, prompts=4)
    assert [heads(busy, d(), tokens=tokens) for tokens in (500.0, 512.0, 513.0, 30_000.0)] == [1, 1, 0, 0]
    assert heads(p(100_000, shared_tokens=0, prompts=4), d(), tokens=1.0) == 0
    assert heads(p(100, shared_tokens=2048, prompts=40), d(), tokens=30_000.0) == 1, "it has credit anyhow"


def test_encoders_go_by_what_they_have_of_items() -> None:
    def e(pending: float, rate: float = 2000.0) -> Credit:
        return p(pending, rate, role=Role.E)

    assert encoders(e(0), e(1000), e(1001), p()) == 2
    assert encoders(e(UNMEASURED_RATE / 2, rate=0)) == 1
    assert encoders(e(UNMEASURED_RATE / 2 + 1, rate=0)) == 0


# --- who decodes ------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_nowhere_while_its_answer_has_no_place() -> None:
    full, roomy = d(requests=4, sequences=0), d(requests=4, sequences=1)
    assert heads(p(), p(), full) == 0
    assert heads(p(), p(), full, roomy) == 2
    assert heads(p(), roomy, sequences=2) == 0


def test_kv_has_to_have_room_for_the_prompt_where_it_is_decoded() -> None:
    half_full = d(requests=1, kv_tokens=1000.0)
    assert [heads(p(), half_full, tokens=tokens) for tokens in (1000.0, 1001.0)] == [1, 0]
    assert heads(p(), half_full, d(requests=1, kv_tokens=5000.0), tokens=1001.0) == 1
    assert heads(pd(requests=1, kv_tokens=10.0), tokens=11.0) == 0


def test_what_is_larger_than_all_there_is_goes_alone() -> None:
    assert heads(pd(sequences=4, kv_tokens=100.0), tokens=1e6, sequences=64) == 1
    assert heads(pd(sequences=4, kv_tokens=100.0, requests=1), tokens=1e6, sequences=64) == 0


def test_what_needs_one_instance_for_both_goes_to_those_that_are_and_no_other() -> None:
    busy = pd(9000)
    assert heads(busy, p(), d(), fused=True) == 0
    assert heads(busy, p(), d()) == 1
    assert heads(p(), d(requests=1, sequences=0), fused=True) == 1, "without any, it goes on where it is refused"


def test_instances_of_all_kinds_that_prefill_count() -> None:
    both = [Credit(role, 0.0, 10_000.0) for role in (Role.P, Role.EP, Role.PD, Role.EPD)]
    assert heads(*both, d()) == 4
    assert heads(*both, d(requests=1, sequences=0)) == 2, "those that decode for themselves"


@pytest.mark.parametrize("instances", [(), (d(),), (p(9000),), (Credit(Role.E, 1e9, 1.0, requests=1),)])
def test_with_nobody_there_a_request_goes_on_to_be_told_so_or_to_wait_for_one(instances: Sequence[Credit]) -> None:
    assert heads(*instances) == MANY
    assert encoders(*(one for one in instances if one.role is not Role.E)) == MANY


def test_no_more_are_looked_at_than_are_enough() -> None:
    looked = 0

    def counted(role: Role) -> Iterator[Credit]:
        nonlocal looked
        for one in (p(), p(9000), p(), p(), p()) if role is Role.P else [d()] if role is Role.D else []:
            looked += 1
            yield one

    speeds = Speeds(1.0, 10_000.0, 1, 5, paths_there=True)
    assert heads_with_room(counted, Need(100.0), LIMITS, speeds, 2) == 2
    assert looked == 4, "the one that decodes, and three"
    assert heads(p(), p(), p(), d(), enough=2) == 2 and heads(p(), p(9000), d(), enough=2) == 1


CREDITS = st.builds(
    Credit,
    st.sampled_from([Role.P, Role.D, Role.PD, Role.EP, Role.EPD]),
    tokens=st.floats(0, 20_000),
    rate=st.sampled_from([0.0, 1000.0, 10_000.0]),
    requests=st.integers(0, 3),
    sequences=st.sampled_from([0, 1, 5, math.inf]),
    kv_tokens=st.sampled_from([0.0, 500.0, math.inf]),
)


@given(st.lists(CREDITS, max_size=6), st.integers(0, 5), st.floats(1, 3000), st.integers(1, 4))
def test_what_one_more_instance_has_to_do_takes_room_from_nobody(
    instances: list[Credit], other: int, tokens: float, sequences: int
) -> None:
    """Of measured ones: each counts for itself."""
    measured = [one for one in instances if one.rate]
    before = heads(*measured, tokens=tokens, sequences=sequences)
    busy = Credit((Role.P, Role.PD)[other % 2], 1e9, 10_000.0, requests=3, sequences=0)
    nobody = not any(one.role is not Role.D for one in measured)
    nobody |= not any(one.role in (Role.PD, Role.EPD, Role.D) for one in measured)
    assert nobody or heads(*measured, busy, tokens=tokens, sequences=sequences) == before


# --- what a report says -----------------------------------------------------------------------------------------------


def report(**said: float) -> StageReport:
    return StageReport("x", "one", 1, **said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "held", "free"),
    [
        ({"max_running": 8}, 0, 10),
        ({"max_running": 8}, 7, 3),
        ({"max_running": 8, "running": 6, "waiting": 1}, 2, 3),
        ({"max_running": 8, "running": 8, "waiting": 2}, 10, 0),
        ({"max_running": 8, "running": 8, "waiting": 9}, 17, 0),
        ({}, 30, 70),
        ({"max_running": 32, "running": 5, "waiting": 2, "kv_used": 0.97}, 7, 0),
        ({"max_running": 32, "running": 5, "waiting": 0, "kv_used": 0.97}, 5, 35),
    ],
)
def test_one_that_decodes_takes_as_many_as_it_runs_and_some_more(said: dict[str, float], held: int, free: int) -> None:
    """But nobody new while its KV is full and somebody waits there."""
    assert seats(report(**said), held, 100) == free


def test_kv_that_is_given_out_and_not_reported_yet_is_taken() -> None:
    half = report(kv_used=0.5, kv_tokens=10_000)
    assert kv_room(half, 0.0) == pytest.approx(10_000 * (KV_FULL - 0.5))
    assert kv_room(half, 4000.0) == pytest.approx(500.0)
    assert kv_room(half, 9000.0) == 0.0
    assert kv_room(report(), 9000.0) == math.inf


# --- of the table -----------------------------------------------------------------------------------------------------

UNREPORTED = 5


class Table:
    """A table of one instance, and the time it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, role: Role) -> None:
        self.now, self.seq, self.role = 100.0, 0, role
        for module in ("proxy.registry.table", "proxy.registry.instance_state"):
            monkeypatch.setattr(f"{module}.time.monotonic", lambda: self.now)
        self.all = InstanceTable()
        self.all.apply(Instance("x", role, "http://x", "one"))

    def reports(self, **said: float) -> None:
        self.seq += 1
        self.all.report(StageReport("x", "one", self.seq, **said))  # type: ignore[arg-type]

    @property
    def credit(self) -> Credit:
        [one] = self.all.credits(self.role, UNREPORTED)
        return one


def test_what_was_planned_counts_from_then_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, Role.P)
    table.now += 10
    table.reports(prompt_tokens_per_s=1000.0)
    assert table.credit.tokens == 0
    lease = table.all.acquire("x", Work.PREFILL, 400.0)
    assert (table.credit.tokens, table.credit.rate, table.credit.requests) == (400.0, 1000.0, 1)
    lease.release()
    assert (table.credit.tokens, table.credit.requests) == (0.0, 0)


def test_what_it_can_have_done_since_it_reported_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, Role.P)
    table.all.acquire("x", Work.PREFILL, 400.0)
    table.now += 10
    table.reports(waiting=1, pending_prompt_tokens=400, prompt_tokens_per_s=1000.0)
    assert table.credit.tokens == 400
    table.now += 0.1
    assert table.credit.tokens == pytest.approx(300)
    table.now += 1.0
    assert table.credit.tokens == 0
    table.all.acquire("x", Work.PREFILL, 400.0)
    assert table.credit.tokens == pytest.approx(400), "what came since it reported is not taken for done"


def test_a_prompt_whose_items_are_being_encoded_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, Role.P)
    table.now += 10
    table.reports(prompt_tokens_per_s=1000.0)
    lease = table.all.acquire("x", Work.PREFILL, 5000.0, {Work.AHEAD: 5000.0})
    assert table.credit.tokens == 0
    lease.over(Work.AHEAD)
    assert table.credit.tokens == 5000
    assert table.all.live(Role.P)[0].load == 5000, "who chooses an instance sees it all along"


def test_kv_counts_where_it_is_to_be_held_from_the_plan_on(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, Role.D)
    table.reports(max_running=8, kv_tokens=10_000, kv_used=0.45)
    assert table.credit.kv_tokens == pytest.approx(5000)
    lease = table.all.acquire("x", Work.DECODE, 1.0, {Work.KV: 3000.0})
    assert (table.credit.kv_tokens, table.credit.sequences) == (pytest.approx(2000), 9)
    table.now += 1
    table.reports(max_running=8, running=1, kv_tokens=10_000, kv_used=0.75)
    assert table.credit.kv_tokens == pytest.approx(2000), "it is in the report now"
    lease.release()
    assert table.credit.sequences == 9, "until it says that it is gone"
    table.now += 1
    table.reports(max_running=8, kv_tokens=10_000, kv_used=0.45)
    assert (table.credit.kv_tokens, table.credit.sequences) == (pytest.approx(5000), 10)


def test_one_that_reports_nothing_may_have_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, Role.PD)
    leases = [table.all.acquire("x", Work.DECODE, 100.0) for _ in range(UNREPORTED)]
    assert (table.credit.requests, table.credit.sequences) == (UNREPORTED, 0)
    assert heads(table.credit) == 0
    leases[0].release()
    assert heads(table.credit) == 1
    table.reports(max_running=2)
    table.now += 60
    assert table.credit.sequences == 1, "what it said once holds no more"


@pytest.mark.parametrize("role", [Role.E, Role.P, Role.D, Role.EP, Role.PD, Role.EPD])
def test_whatever_it_is_it_has_no_credit_beyond_its_seconds_sequences_and_kv(
    monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    """Whether requests share its steps or not, as it reports and as it is given more after that."""
    table = Table(monkeypatch, role)
    table.now += 10
    said = {"max_running": 1, "kv_tokens": 1000, "prompt_tokens_per_s": 1000.0, "item_tokens_per_s": 1000.0}
    others = [d(requests=1)] if role in (Role.P, Role.EP) else [p()] if role is Role.D else []

    def room() -> int:
        found = of(table.credit, *others)
        speeds = Speeds.measured(found, LIMITS)
        if role is Role.E:
            return encoders_with_room(found, Need(items=(200.0,)), LIMITS, speeds, MANY)
        return heads_with_room(found, Need(200.0), LIMITS, speeds, MANY)

    table.reports(**said)
    assert room() == 1
    work = Work.ENCODE if role is Role.E else Work.DECODE if role.decodes else Work.PREFILL
    for _ in range(3):
        table.all.acquire("x", work, 900.0, {Work.KV: 900.0} if role.decodes else {})
    assert (table.credit.requests, room()) == (3, 0), "given, and not reported yet"
    table.now += 1
    table.reports(**said, running=1, waiting=2, pending_prompt_tokens=2700, pending_item_tokens=2700, kv_used=0.9)
    assert (table.credit.requests, room()) == (3, 0)


def test_what_other_hosts_gave_it_is_seen_in_what_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, Role.PD)
    table.reports(max_running=1, running=1, waiting=1)
    assert (table.credit.requests, table.credit.sequences, heads(table.credit)) == (2, 0, 0)


def test_one_that_is_down_or_drains_has_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, Role.PD)
    for gone in (lambda: table.all.drain("x"), lambda: table.all.mark_down("x", "gone")):
        gone()
        assert [*table.all.credits(Role.PD, 1)] == []


# --- speeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "tiles", "encoders", "expected"),
    [
        ((4000.0,), (4,), 4, (1.0, 4.0, 1.0)),
        ((4000.0,), (13,), 2, (2.0, 4.0, 2.0)),
        ((4000.0,), (1,), 4, (4.0, 4.0, 4.0)),
        ((4000.0,), (), 4, (4.0, 4.0, 4.0)),
        ((4000.0, 4000.0), (4, 4), 4, (2.0, 8.0, 2.0)),
        ((4000.0, 1000.0), (4, 1), 4, (2.0, 5.0, 2.0)),
        ((4000.0, 4000.0), (4, 4), 3, (4.0, 8.0, 4.0)),
    ],
)  # fmt: skip
def test_an_image_of_several_tiles_is_served_by_as_many_encoders_as_would_share_it(
    items: tuple[float, ...], tiles: tuple[int, ...], encoders: int, expected: tuple[float, float, float]
) -> None:
    alone = Speeds(encode=1000.0, prefill=10_000.0, encoders=encoders).service(Need(items=items, tiles=tiles))
    assert (alone.encode_s, alone.encode_work_s, alone.longest_item_s) == expected


def test_a_request_by_itself_takes_its_longest_share_at_the_encoders_and_its_prompt_at_one_instance() -> None:
    speeds = Speeds(encode=1000.0, prefill=10_000.0, encoders=2, heads=4)
    alone = speeds.service(Need(tokens=5000.0, items=(1000.0, 1000.0, 1000.0)))
    assert alone.encode_s == pytest.approx(2.0, rel=0.3) and alone.prefill_s == 0.5
    assert (alone.encode_work_s, alone.prefill_work_s, alone.longest_item_s) == (3.0, 0.5, 1.0)
    text = speeds.service(Need(tokens=5000.0))
    assert (text.encode_s, text.encode_work_s, text.prefill_s) == (0.0, 0.0, 0.5)
    assert (speeds.of(encode=True), speeds.of(encode=False)) == (2, 4)


def test_speeds_are_those_measured_of_a_usual_one() -> None:
    there = of(
        p(rate=0.0), p(rate=2000.0), pd(rate=8000.0), pd(rate=4000.0), Credit(Role.E, rate=500.0), Credit(Role.E)
    )
    assert Speeds.measured(there, LIMITS) == Speeds(500.0, 4000.0, 2, 4, True, True, False)
    assert Speeds.measured(of(pd(rate=0.0)), LIMITS) == Speeds(UNMEASURED_RATE, 2000.0, 1, 1, False, True, False)
    assert Speeds.measured(of(p(), d()), LIMITS).fused_alone and not Speeds.measured(of(p()), LIMITS).paths_there
    nobody = Speeds.measured(of(), LIMITS)
    assert (nobody.encoders, nobody.heads) == (1, 1) and nobody.prefill == 2000.0


def test_what_an_api_server_prepares_is_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests a second that it has for 0.4 s each before its scheduler does: credit reaches that much further."""
    table = Table(monkeypatch, Role.E)
    said = {"item_tokens_per_s": 1000.0, "max_running": 8}
    table.reports(**said)
    for _ in range(20):
        lease = table.all.acquire("x", Work.ENCODE, 100.0)
        table.now += 0.4
        table.reports(**said)
        table.now += 0.1
        table.reports(**said, running=1, pending_item_tokens=100)
        lease.release()
    assert table.credit.preparing_s == pytest.approx(0.35, rel=0.1)
    assert Credit(Role.E, 800.0, 1000.0, preparing_s=0.4).before_s(100.0, 1.0) == pytest.approx(0.4)


def test_who_is_late_has_no_part_of_a_step_that_others_may_want() -> None:
    one, beside = p(1000.0, shared_tokens=2048, prompts=1), d()
    assert heads(one, beside, tokens=1000.0) == 1
    crowded = p(9000.0, shared_tokens=2048, prompts=1)
    assert heads(crowded, beside, tokens=1000.0) == 1
    assert heads(crowded, beside, tokens=1000.0, yields=True) == 0
