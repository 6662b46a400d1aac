"""Phases as durations: what overlaps, what of it a request waited for, and what many requests have in the mean."""

from __future__ import annotations

import pytest

from bench.clients.phases import (
    Breakdown,
    RequestPhases,
    breakdown,
    durations,
    exposed,
    line,
    phase_figures,
    phase_rows,
    request_phases,
)
from epd_serve.phases.phase import Phase, Span


def test_a_duration_counts_once_what_two_of_one_phase_share():
    encodes = [Span(1.0, 3.0, Phase.ENCODE), Span(2.0, 4.0, Phase.ENCODE), Span(6.0, 7.0, Phase.ENCODE)]

    assert durations(encodes) == {Phase.ENCODE: 4.0}


@pytest.mark.parametrize(
    ("one", "other", "taken"),
    [
        (Span(0, 4, Phase.PREFILL), Span(1, 6, Phase.PD), {Phase.PREFILL: 4, Phase.PD: 2}),
        (Span(0, 6, Phase.PREFILL_QUEUE), Span(2, 4, Phase.EP), {Phase.PREFILL_QUEUE: 4, Phase.EP: 2}),
        (Span(0, 6, Phase.EP), Span(2, 5, Phase.PREPROCESS_P), {Phase.EP: 3, Phase.PREPROCESS_P: 3}),
        (Span(0, 6, Phase.PREPROCESS_P), Span(1, 4, Phase.PREPROCESS_D), {Phase.PREPROCESS_P: 6}),
        (Span(0, 1, Phase.HTTP_P), Span(2, 3, Phase.PREPROCESS_P), {Phase.HTTP_P: 1, Phase.PREPROCESS_P: 1}),
    ],
    ids=["work hides a transfer", "a transfer hides a wait", "front end hides it too", "the last is waited for", "gap"],
)
def test_every_moment_belongs_to_what_is_waited_for(one: Span, other: Span, taken: dict[Phase, float]):
    assert exposed([one, other]) == exposed([other, one]) == taken


def test_what_no_phase_accounts_for_is_an_error_of_the_sum():
    spans = [Span(0.0, 0.06, Phase.PROXY), Span(0.07, 0.1, Phase.PREFILL), Span(0.1, 0.2, Phase.DECODE)]

    found = line({"id": "x-0", "run": "r"}, spans, due_s=0.0, first_s=0.1, last_s=0.2)

    assert (found["unaccounted_ms"], found["sum_error"]) == pytest.approx((10.0, 0.1))
    assert (found["id"], found["ttft_ms"], found["e2e_ms"]) == ("x-0", 100.0, 200.0)
    assert found["phases_ms"] == {"proxy": 60.0, "prefill": 30.0, "decode": 100.0}


def request(taken: dict[str, float], alone: dict[str, float], *, e2e_ms: float = 120.0) -> RequestPhases:
    plain = {"id": "x", "run": "r", "ttft_ms": 100.0, "e2e_ms": e2e_ms, "phases_ms": taken, "exposed_ms": alone}
    return request_phases(plain)


def of(*, encode: float = 30.0, packet: float = 5.0, e2e_ms: float = 120.0) -> Breakdown:
    taken = {"encode": encode, "E→P": 1.0, "prefill": 60.0, "P→D": packet, "decode": 20.0}
    found = breakdown([request(taken, {**taken, "E→P": 0.0, "P→D": 1.0}, e2e_ms=e2e_ms)])
    assert found is not None
    return found


def test_a_request_that_skips_a_phase_spends_nothing_in_it():
    image, text = ({"encode": 30.0, "prefill": 60.0}, {"prefill": 40.0})

    found = breakdown([request(image, image), request(text, text)])

    assert found is not None
    assert (found.mean[Phase.ENCODE], found.p95[Phase.ENCODE], found.mean[Phase.PREFILL]) == (15.0, 30.0, 50.0)
    assert (found.requests, found.encoded, found.ttft_ms) == (2, 1, 100.0)


def test_of_no_request_there_is_no_mean():
    assert breakdown([]) is None


def test_a_phase_of_another_version_is_refused():
    with pytest.raises(ValueError, match="tea"):
        request({"tea": 1.0}, {})


def test_figures_have_durations_their_tail_and_the_exposed_part():
    found = phase_figures(of())

    assert found["joined"] == 1
    assert found["phases_ms"]["P→D"] == found["phases_p95_ms"]["P→D"] == 5.0
    assert found["exposed_ms"]["P→D"] == 1.0


@pytest.mark.parametrize(
    ("packet", "e2e_ms", "verdict"), [(1.0, 2000.0, "met"), (9.0, 2000.0, "MISSED"), (2.0, 120.0, "MISSED")]
)
def test_migrations_are_held_against_hydrainfers(packet: float, e2e_ms: float, verdict: str):
    goals = {one["phase"]: one["goal"] for one in phase_rows(of(packet=packet, e2e_ms=e2e_ms)) if one["goal"]}

    assert goals.keys() == {"E→P", "P→D"} and goals["P→D"].endswith(verdict)
