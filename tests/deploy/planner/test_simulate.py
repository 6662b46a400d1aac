"""Requests in virtual time: by hand, and that equal steps which count as one change nothing."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deploy.planner import stage
from epd_serve.errors import ConfigError
from epd_serve.sim.profile import Line
from epd_serve.slo import Slo
from epd_serve.traffic import Item, Request
from tests.deploy.planner.rounds import PROFILE, STAGE, drawn, request, served

LAYOUTS = ("TP1x2", "EP-D", "E-P-D", "(E-PD)x2", "(E-P)-D", "(E-D)-P", "2E-P-2D", "(E-P-D)", "EPD-E-PD")
NEIGHBOURS = ("(E-PD)x2", "(E-D)-P", "(E-P-D)")
"""An encoder hears of its neighbour's steps there, of those that count as one once: budgets are not the same."""
ENCODE, PREFILL, STEP = 0.1, 0.22, 0.011


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1 << 30),
    rate_rps=st.sampled_from((0.7, 2.3, 6.1)),
    limit_ms=st.sampled_from((11.5, 17.0, 60.0)),
    tight=st.booleans(),
    held=st.booleans(),
)
def test_steps_that_count_as_one_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    seed: int,
    rate_rps: float,
    limit_ms: float,
    *,
    tight: bool,
    held: bool,
) -> None:
    """`tight`: KV for a few requests, so that some wait and some are preempted. `held`: to budgets."""
    capacity = STAGE.capacity if not tight else replace(STAGE.capacity, kv_tokens=1600)
    one = replace(STAGE, capacity=capacity, encode=Line(0.0007, 0.000317), decode_step_s=((1, 0.0113), (2, 0.01237)))
    profile = replace(PROFILE, stages={1: one}, front=Line(0.0531, 0.0000713))
    traffic, slo = drawn(seed, 25, rate_rps), Slo(2000, limit_ms)
    budgets = slo if held and layout not in NEIGHBOURS else None
    together = served(layout, *traffic, profile=profile, slo=slo, budgets=budgets)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "MOST_STEPS", 1)
        apart = served(layout, *traffic, profile=profile, slo=slo, budgets=budgets)
    for quick, slow in zip(together.served, apart.served, strict=True):
        assert (quick.first_s, quick.last_s) == pytest.approx((slow.first_s, slow.last_s), abs=1e-6)
        assert quick.within == slow.within and quick.instances == slow.instances


def test_a_monolith_takes_front_encode_and_prefill_and_a_step_a_token() -> None:
    (one,) = served("TP1", request(1, 2.0)).served
    assert one.ttft_s == pytest.approx(0.5 + ENCODE + PREFILL)
    assert one.tpot_s == pytest.approx(STEP) and (one.gaps, one.within) == (3, (3,))
    assert (one.path, one.instances) == ("EPD", ("EPD0",))


def test_a_stream_begins_with_ps_token_and_waits_for_ds_second_one() -> None:
    (one,) = served("E-P-D", request(1, 0.0)).served
    assert one.ttft_s == pytest.approx(0.5 + ENCODE + 0.04 + PREFILL)
    assert one.last_s - one.first_s == pytest.approx(0.02 + 0.002 + 3 * STEP)
    assert one.within == (3,), "22 ms of transfer and recomputing, and a step"
    (late,) = served("E-P-D", request(1, 0.0), slo=Slo(2000, 25)).served
    assert late.within == (2,)
    (paper,) = served("E-P-D", request(1, 0.0), first_token="decode").served
    assert paper.ttft_s == pytest.approx(one.ttft_s + 0.022)


def test_gaps_are_those_of_the_steps_that_a_request_saw() -> None:
    """The second one's encode and prefill stand once between tokens of the first."""
    first, second = request(1, 0.0, tokens=60), request(2, 0.4, tokens=2)
    one, _ = served("TP1", first, second).served
    assert (one.gaps, one.within) == (59, (58,))
    apart, _ = served("EP-D", first, second).served
    assert apart.within == (59,)


def test_an_equal_item_is_encoded_once_and_a_session_finds_its_prefix() -> None:
    twice = [Request(f"r{n}", 5.0 * n, 110, 2, (Item(100, key="same"),)) for n in range(2)]
    first, second = served("E-P-D", *twice).served
    assert second.ttft_s == pytest.approx(first.ttft_s - ENCODE - 0.04)
    talk = [request(n, 5.0 * n, items=(), text=100 + 50 * n, session="s", cached_tokens=80 * n) for n in range(2)]
    begun, gone_on = served("TP1x2", *talk).served
    assert gone_on.ttft_s == pytest.approx(0.5 + 0.002 * (150 - 80)) and gone_on.instances == begun.instances


def test_two_devices_of_one_stage_take_their_own_times() -> None:
    fast = replace(STAGE, prefill=Line(0.0, 0.001))
    both = replace(PROFILE, stages={1: STAGE, 2: fast})
    (one,) = served("TP2", request(1, 0.0), profile=both).served
    assert one.ttft_s == pytest.approx(0.5 + ENCODE + PREFILL / 2)
    with pytest.raises(ConfigError, match="layout EPD:tp4 has tp4; the profile has sizes 1, 2"):
        served("TP4", request(1, 0.0), profile=both)


def test_budgets_keep_a_prompt_out_of_the_gaps() -> None:
    slo = Slo(4000, 60)
    traffic = [request(0, 0.0, items=(), tokens=200), *(request(n, 0.3 * n, items=(), text=150) for n in range(1, 9))]
    free, held = (served("TP1", *traffic, slo=slo, budgets=budgets).served[0] for budgets in (None, slo))
    assert free.within[0] < held.within[0], "a prompt of 0.3 s breaks one gap of 60 ms in one step, or none in many"
    assert held.last_s == pytest.approx(free.last_s, rel=0.2)


def test_more_context_and_more_kv_take_longer() -> None:
    deep = replace(PROFILE, stages={1: replace(STAGE, prefill_context_s=1e-5, decode_kv_s=1e-5)})
    plain, slow = (served("TP1", request(1, 0.0, items=(), text=400), profile=p).served[0] for p in (PROFILE, deep))
    assert slow.ttft_s - plain.ttft_s == pytest.approx(1e-5 * 400 * 399 / 2)
    assert slow.tpot_s == pytest.approx(plain.tpot_s + 1e-5 * 401, rel=0.01)


def test_the_front_shares_the_device_where_it_computes_there() -> None:
    busy = replace(PROFILE, front_busy=Line(0.5))
    alone, _ = served("TP1", request(1, 0.0), request(2, 9.0), profile=busy).served
    assert alone.ttft_s == pytest.approx(0.5 + ENCODE + PREFILL)
    one, _ = served("TP1", request(1, 0.0, tokens=60), request(2, 0.82), profile=busy).served
    assert one.last_s - one.first_s > 59 * STEP + 0.25, "its tokens take turns with the second one's front"


def test_the_front_computes_on_the_device_of_its_host_that_does_least() -> None:
    """The second one comes while P computes the first one's prompt of 1 s, and D has nothing to do."""
    busy = replace(PROFILE, front_busy=Line(0.5))
    traffic = request(1, 0.0, items=(), text=500), request(2, 0.6, items=())
    for host_devices, more_s in ((1, 0.5), (2, 0.0)):
        first, _ = served("P-D", *traffic, profile=replace(busy, host_devices=host_devices)).served
        assert first.ttft_s == pytest.approx(0.5 + 1.0 + more_s)


def test_what_another_device_of_the_host_does_slows_a_step_by_its_share_of_the_time() -> None:
    """An encoder that is busy all the time makes each decode step a fifth longer, one of another host does not."""
    busy = [request(n, 0.0, items=(2000,), text=1, tokens=1) for n in range(2, 30)]
    quick = replace(STAGE, prefill=Line(0.0, 0.0001))
    slow = replace(PROFILE, stages={1: quick}, beside={"decode beside encode": 1.2})
    text = request(1, 40.0, items=(), tokens=100)
    for host_devices, times in ((1, 1.0), (3, 1.2)):
        run = served("E-P-D", *busy, text, profile=replace(slow, host_devices=host_devices))
        one = next(one for one in run.served if one.id == "r1")
        assert one.tpot_s == pytest.approx(times * STEP, rel=0.02)


def test_steps_that_spread_are_within_a_limit_as_often_as_their_profile_says() -> None:
    """A quarter of steps takes twice as long: a limit of 1.5 steps is kept by three quarters, one of 2.1 by all."""
    uneven = replace(PROFILE, spread=(0.6, 0.7, 0.7, 2.0))
    one = request(1, 0.0, items=(), tokens=2000)
    for limit_steps, share in ((0.5, 0.0), (1.5, 0.75), (2.1, 1.0)):
        (found,) = served("TP1", one, profile=uneven, slo=Slo(2000, 1e3 * limit_steps * STEP)).served
        assert found.within[0] / found.gaps == pytest.approx(share, abs=0.04)
        assert found.tpot_s == pytest.approx(STEP), "what is spread is the gaps, not the sum"


def test_a_share_of_the_cores_is_slower_and_meets_nobody() -> None:
    first, second = request(1, 0.0, tokens=20), request(2, 0.4)
    shared, _ = served("(E-D)-P", first, second).served
    alone, _ = served("(E-D)-P", first, second, core_share="E=0.5,D=0.5").served
    assert alone.tpot_s is not None and shared.tpot_s is not None and alone.tpot_s > shared.tpot_s
    assert alone.ttft_s == pytest.approx(shared.ttft_s + ENCODE)


def test_a_busy_stage_is_told_by_kind() -> None:
    run = served("E-P-D", request(1, 0.0), request(2, 1.0))
    assert set(run.busy) == {"E0", "P0", "D0"}
    assert run.busy["E0"]["encode"] == pytest.approx(2 * ENCODE / run.span_s) and run.busy["E0"]["decode"] == 0
    assert run.attained(0) == 1.0
