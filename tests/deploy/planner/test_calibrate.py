"""A profile that is off agrees with what was served once it is corrected, and says how far it still is."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from deploy.planner.calibrate import LEAST_STREAMS, by_clients, by_steps
from deploy.planner.profile import DeviceProfile
from deploy.planner.simulate import simulate
from deploy.planner.steps import Step
from deploy.planner.workload import workload_of
from epd_serve.errors import ConfigError
from epd_serve.image_tokens import ByArea
from epd_serve.layout_parser import parse
from epd_serve.sim.profile import Line
from epd_serve.traffic import Request
from tests.deploy.planner.test_assemble import TRUE, decodes, step


def scaled(steps: Iterable[Step], factor: float) -> list[Step]:
    return [
        Step(one.instance, one.begun_s, one.begun_s + one.seconds * (factor if one.decodes else 1.0), *list(work(one)))
        for one in steps
    ]


def work(one: Step) -> tuple[int, ...]:
    return one.prompt_tokens, one.item_tokens, one.decodes, one.item_pairs, one.context_tokens, one.kv_tokens


def test_a_profile_is_calibrated_by_steps_that_were_served() -> None:
    profile = DeviceProfile("m", "d", {1: TRUE, 2: TRUE})
    served = scaled([*decodes("PD0", 0.0), *decodes("PD0", 100.0), step("PD0", 300.0, prompt=99)], 1.3)
    found = by_steps(profile, served)
    assert found.how == "calibrated" and "decode x 1.30" in found.comment
    for stage in found.stages.values():
        assert stage.decode_s(16, 2000) == pytest.approx(1.3 * TRUE.decode_s(16, 2000))
        assert stage.prefill == TRUE.prefill, "one step is no reason"


WORKLOAD = workload_of("images=0-2@448x448,text=16-200,output=8-64", ByArea())
DEVICE = DeviceProfile("m", "d", {1: TRUE}, front=Line(0.02, 0.0001), handover=Line(0.005), kv=Line(0.002))


def slower(first: float, later: float) -> DeviceProfile:
    """`DEVICE`, so many times as slow until the first token, and after it."""

    def times(line: Line) -> Line:
        return Line(line.setup_s * first, line.per_unit_s * first)

    stage = replace(
        TRUE,
        encode=times(TRUE.encode),
        encode_context_s=TRUE.encode_context_s * first,
        prefill=times(TRUE.prefill),
        prefill_context_s=TRUE.prefill_context_s * first,
        decode_step_s=tuple((batch, s * later) for batch, s in TRUE.decode_step_s),
        decode_kv_s=TRUE.decode_kv_s * later,
    )
    lines = {name: times(getattr(DEVICE, name)) for name in ("front", "handover", "kv")}
    return replace(DEVICE, stages={1: stage}, **lines)


def recorded(device: DeviceProfile, layout: str, rate_rps: float) -> list[Request]:
    """What a deployment of such devices would have recorded."""
    sent = WORKLOAD.at(rate_rps, 400, 3)
    served = simulate(parse(layout), device, sent).served
    return [replace(one, ttft_s=had.ttft_s, e2e_s=had.e2e_s) for one, had in zip(sent, served, strict=True)]


@pytest.mark.parametrize("layout", ["TP1x2", "E-PD", "E-P-D"])
@pytest.mark.parametrize(("first", "later"), [(1.6, 0.7), (0.5, 1.5), (1.0, 1.0)])
def test_what_clients_waited_for_corrects_a_profile(layout: str, first: float, later: float) -> None:
    traffic = recorded(slower(first, later), layout, 3.0)
    found = by_clients(DEVICE, parse(layout), traffic)
    right = slower(first, later).stages[1]
    assert found.stages[1].decode_s(8) == pytest.approx(right.decode_s(8), rel=0.05)
    assert found.stages[1].prefill.per_unit_s == pytest.approx(right.prefill.per_unit_s, rel=0.05)
    assert found.how == "calibrated" and str(parse(layout)) in found.comment
    assert max(found.noise.ttft, found.noise.tpot, found.noise.e2e) < 0.05


def test_what_no_scale_explains_is_said_to_be_off() -> None:
    traffic = recorded(DEVICE, "E-PD", 3.0)
    half = len(traffic) // 2
    changed_halfway = traffic[:half] + [
        replace(one, ttft_s=2 * one.ttft_s, e2e_s=one.e2e_s + one.ttft_s) for one in traffic[half:]
    ]
    assert by_clients(DEVICE, parse("E-PD"), changed_halfway).noise.ttft == pytest.approx(0.5, abs=0.1)


def test_answers_in_one_piece_tell_nothing() -> None:
    whole = [replace(one, ttft_s=0.0) for one in recorded(DEVICE, "TP1", 1.0)[LEAST_STREAMS:]]
    with pytest.raises(ConfigError, match=r"times of 0 streams.*40 are needed"):
        by_clients(DEVICE, parse("TP1"), whole)
