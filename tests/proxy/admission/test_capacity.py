"""How much may be with the stages at once."""

from __future__ import annotations

import math

from epd_serve.roles import Role
from epd_serve.wire import StageReport
from proxy.admission.gate import capacity
from proxy.admission.queue import Capacity
from proxy.config.limits import AdmissionLimits

LIMITS = AdmissionLimits(sequences_per_instance=100, prefill_tokens=1000, prefill_s=2.0, encodes_per_instance=4)


def stage(role: Role, **load: float) -> tuple[Role, StageReport | None]:
    return role, StageReport("x", "one", 1, **load) if load else None  # type: ignore[arg-type]


def test_without_reports_it_is_what_the_settings_say_for_each_instance() -> None:
    stages = [stage(role) for role in (Role.E, Role.E, Role.P, Role.D, Role.D, Role.EPD)]
    assert capacity(stages, LIMITS) == Capacity(encodes=8, sequences=300, prefill_tokens=2000)


def test_an_instance_says_how_many_it_runs_and_some_more_are_on_their_way() -> None:
    assert capacity([stage(Role.D, max_running=8)], LIMITS).sequences == 10


def test_one_whose_kv_is_full_gets_nobody_new_while_somebody_waits_there() -> None:
    full = {"max_running": 32, "running": 5, "waiting": 2, "kv_used": 0.97}
    assert capacity([stage(Role.D, **full)], LIMITS).sequences == 7
    assert capacity([stage(Role.D, **{**full, "waiting": 0})], LIMITS).sequences == 40
    assert capacity([stage(Role.D, **{**full, "running": 0, "waiting": 1})], LIMITS).sequences == 1


def test_a_fast_instance_gets_as_much_as_it_prefills_in_the_time_allowed() -> None:
    assert capacity([stage(Role.P, prompt_tokens_per_s=5000.0)], LIMITS).prefill_tokens == 10_000
    assert capacity([stage(Role.P, prompt_tokens_per_s=5.0)], LIMITS).prefill_tokens == 1000


def test_with_nobody_there_requests_may_go_on_to_be_told_so() -> None:
    assert capacity([], LIMITS) == Capacity(4, 100, 1000)


def test_several_proxies_share_it() -> None:
    assert capacity([stage(Role.PD)], LIMITS, processes=3) == Capacity(2, math.ceil(100 / 3), math.ceil(1000 / 3))
