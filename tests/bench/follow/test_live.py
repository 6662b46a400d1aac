"""The live parts of `epd-bench follow`: what is sent, what is judged, and a small deployment that they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bench.clients.results import Outcome, RequestRecord
from bench.clients.sender import Run
from bench.follow import live, real
from bench.follow.live import Load, load_of, outcome, run_load, slo_flags, slower
from bench.served import simulated
from deploy.planner.profile import read_device_profile
from epd_serve.sim.items import picture_size
from epd_serve.slo import Slo

PROFILE = read_device_profile(Path("bench/results/profiles/plan.json"))


def record(n: int, due_s: float, first_s: float, **more: Any) -> RequestRecord:
    shared: dict[str, Any] = {"run": "", "id": "r", "spec": "", "ready_s": due_s, "ended_s": first_s}
    shared |= {"outcome": Outcome.OK, "token_s": (first_s,), "first_byte_s": first_s, "kind": "text"}
    return RequestRecord(n=n, due_s=due_s, **{**shared, **more})


def test_what_is_sent_is_what_is_predicted() -> None:
    load = load_of(4.0, 1)
    text, media = load.flows("model")
    assert len(text.requests) + len(media.requests) == len(load.requests) and load.seconds == 8.0
    assert media.dues == [one.at_s for one in load.requests if one.items]
    assert len({bytes(one.body) for one in (*text.requests, *media.requests)}) == len(load.requests), "no cache helps"
    url = msgspec.json.decode(media.requests[0].body)["messages"][0]["content"][1]["image_url"]["url"]
    assert picture_size(url) == (live.SIDE, live.SIDE)
    bodies = [msgspec.json.decode(flow.requests[0].body) for flow in (text, media)]
    assert [body["max_tokens"] for body in bodies] == [live.LONG, live.SHORT]


def test_every_step_of_the_slower_device_is_as_much_slower() -> None:
    one, other = PROFILE.stages[1], slower(PROFILE, 3.0).stages[1]
    for amount in (1, 400, 2000):
        assert other.prefill.seconds(amount) == pytest.approx(3 * one.prefill.seconds(amount))
        assert other.encode.seconds(amount) == pytest.approx(3 * one.encode.seconds(amount))
    assert other.decode_s(8, 100.0) == pytest.approx(3 * one.decode_s(8, 100.0))


def test_goodput_counts_whole_answers_within_the_slo_and_every_failure_is_told() -> None:
    rows = [
        record(0, 100.0, 100.5),
        record(1, 101.0, 109.0),
        record(2, 112.0, 113.0, kind="media"),
        record(3, 113.0, 113.5, outcome=Outcome.TRUNCATED, fault="cut"),
        record(4, 114.0, 114.5, outcome=Outcome.ERROR, fault="status 503", token_s=(), first_byte_s=None),
    ]
    found = outcome(Run("", begun_s=100.0, rows=rows), Slo(2000, 100), 20.0, 10.0)
    assert (found["requests"], found["goodput_rps"], found["errors"], found["cut"]) == (5, 0.1, 1, 1)
    assert found["phases"] == [[2, 1], [3, 1]] and found["by_kind"] == {"media": 1.0, "text": 0.25}
    assert found["faults"] == ["cut", "status 503"]


def row(part: str, how: str, what: str, rps: float, **more: Any) -> dict[str, Any]:
    shared = {"errors": 0, "cut": 0, "cpu": 0.5, "machine_cpu": 0.8, "phases": [[100, 90], [100, round(10 * rps)]]}
    return {"part": part, "how": how, "what": what, "goodput_rps": rps, **shared, **more}


def test_following_is_set_beside_the_oracle_and_the_best_fixed_layout() -> None:
    rows = [
        row("live", "predicted", "follow", 9.0),
        row("live", "measured", "follow", 9.5, cut=1),
        row("live", "measured", "oracle 0 s ahead", 10.0, errors=2),
        row("live", "measured", live.FIXED[0], 5.0, errors=7),
    ]
    rows[1]["phases"] = [*rows[1]["phases"], [100, 100]]  # the others have none such
    assert live.figures(rows) == {
        "live_over_oracle": 0.9737,
        "live_over_best_fixed": 1.3214,
        "live_errors": 3.0,
        "live_cpu": 0.5,
        "live_machine_cpu": 0.8,
    }
    assert live.figures([]) == {}


def test_more_than_either_fixed_layout_is_shown_only_beyond_its_interval() -> None:
    def rows(rps: float) -> list[dict[str, Any]]:
        others = [row("real", "measured", what, 5.0) for what in (real.PICTURES, real.TEXT)]
        return [row("real", "measured", "follow", rps), *others]

    clear, unclear = real.figures(rows(9.0)), real.figures(rows(5.2))
    assert clear["real_over_fixed"] == 1.2857 and clear["real_over_fixed_low"] > 1
    assert unclear["real_over_fixed"] == 1.0143 and unclear["real_over_fixed_low"] < 1 < unclear["real_over_fixed_high"]


def test_real_requests_are_of_the_size_that_is_predicted() -> None:
    load = real.RealLoad.of(10.0, 3, 196)
    text, media = load.flows("model")
    assert load.seconds == 30.0 and len(load.traffic()) == len(text.requests) + len(media.requests)
    assert all(one.expected_tokens == real.PICTURE_ANSWER for one in media.requests)
    assert {one.output_tokens for one in load.traffic() if not one.items} == {real.TEXT_ANSWER}


@pytest.mark.slow
def test_a_small_deployment_follows_and_is_changed_under_load() -> None:
    whole = load_of(5.0, 1)
    load = Load([one for one in whole.requests if int(one.id) % 4 == 0], 5.0, whole.turns)
    device = replace(slower(PROFILE, 1.0), start_s=0.5)
    flags = ["--device", "cpu", "--switchable", "--follow", "act", "--follow-every-s", "1", *slo_flags(live.SLO)]
    with simulated("2E-2P-2D", live.builtins(device), flags) as launch:
        flows, turns = load.flows(launch.model), [(2.0, "E-3P-2D")]
        found = run_load(launch, flows, live.SLO, phase_s=5.0, seconds=10.0, turns=turns, limit_s=60.0)
    assert found["errors"] == found["cut"] == 0 and found["requests"] == len(load.requests)
    assert found["attained"] > 0.9 and [one["state"] for one in found["changes"]] == ["done"]
    assert found["layout_at_end"] == "E-3P-2D" and 0 < found["cpu"] <= found["machine_cpu"] <= 1
