"""The eight phases of a request, from the names of milestones."""

from __future__ import annotations

import pytest

from bench.analysis.phases import Phase, RequestPhases, breakdown, request_phases
from bench.phases import DIRECT, DISAGGREGATED, MONOLITH, SEEN_BY_PROXY, SENT
from tests.bench.clients.made import row

SPLIT = {
    "client to proxy": 1.0,
    "E: scheduled": 2.0,
    "E: vision tower": 30.0,
    "event reaches P": 4.0,
    "P: feature at hand, scheduled": 5.0,
    "P: forward pass": 60.0,
    "KV after the end of prefill (exposed)": 7.0,
    "D: notice": 8.0,
    "D: forward pass, answer": 9.0,
}
FUSED = {"client to proxy": 1.0, "prefill and first decode, with their queues": 199.0}


EIGHT = [Phase(name) for name in "encode queue,encode,E→P transfer,prefill queue,prefill,P→D transfer".split(",")]
EIGHT += [Phase.DECODE_QUEUE, Phase.DECODE]


def request(phases: dict[str, float], name: str = "x-0") -> RequestPhases:
    return request_phases({"id": name, "run": "2 rps", "phases_ms": phases})


def of(phases: dict[str, float], ttft: float = 0.126):
    found = breakdown([request(phases)], [row(0, ttft=ttft, tokens=3, gap=0.01)])
    assert found is not None
    return found


def test_every_milestone_has_a_phase():
    for milestone in (SENT, *DISAGGREGATED, *SEEN_BY_PROXY, *MONOLITH, *DIRECT):
        assert Phase.OTHER not in request({milestone.phase: 1.0, "P: forward pass": 1.0}).taken


def test_the_phases_of_stages_apart_are_the_eight():
    found = of(SPLIT).eight()

    assert [found[phase] for phase in EIGHT] == pytest.approx([2.0, 30.0, 4.0, 5.0, 60.0, 7.0, 8.0, 9.0 + 20.0])
    assert found[Phase.OUTSIDE] == 1.0


def test_an_instance_of_several_stages_is_one_piece():
    mixed = {"client to proxy": 1.0, "E: vision tower": 30.0, "D: forward pass, answer": 90.0}  # (E-PD)

    assert request(mixed).taken == {Phase.OUTSIDE: 1.0, Phase.ENCODE: 30.0, Phase.WHOLE: 90.0}
    assert request(FUSED).taken == {Phase.OUTSIDE: 1.0, Phase.WHOLE: 199.0}


def test_what_nobody_knows_the_name_of_is_kept():
    assert request({"tea": 3.0}).taken == {Phase.OTHER: 3.0}


def test_a_request_that_skips_a_phase_spends_nothing_in_it():
    text = {name: ms for name, ms in SPLIT.items() if not name.startswith(("E:", "event"))}
    found = breakdown([request(SPLIT), request(text, "x-1")], [row(0), row(1)])

    assert found is not None
    assert found.taken[Phase.ENCODE] == 15.0
    assert (found.requests, found.encoded) == (2, 1)


def test_requests_without_an_answer_are_in_no_mean():
    assert breakdown([request(SPLIT)], []) is None
