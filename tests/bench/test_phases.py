"""Phases of a TTFT from stamps."""

from __future__ import annotations

import pytest

from bench.phases import DIRECT, DISAGGREGATED, MONOLITH, groups, hidden, phases

IN_TURN = {milestone.event: 10.0 + 0.01 * (index + 1) for index, milestone in enumerate(DISAGGREGATED)}


def test_phases_add_up_to_the_ttft():
    taken = phases(DISAGGREGATED, IN_TURN, sent=10.0)

    assert sum(taken.values()) == pytest.approx(IN_TURN["first_content"] - 10.0)
    assert len(taken) == len(DISAGGREGATED)
    assert all(seconds == pytest.approx(0.01) for seconds in taken.values())


def test_work_hidden_behind_something_slower_counts_nothing():
    events = {**IN_TURN, "decode_arrived": IN_TURN["dispatched"] - 0.05}

    taken = phases(DISAGGREGATED, events, sent=10.0)

    assert taken["D: HTTP, preprocessing, to the scheduler"] == 0
    assert sum(taken.values()) == pytest.approx(IN_TURN["first_content"] - 10.0)


def test_an_answer_of_the_encoder_that_nothing_waited_for_is_no_phase():
    events = {**IN_TURN, "encode_done": IN_TURN["prefill_end"]}

    taken = phases(DISAGGREGATED, events, sent=10.0)

    assert "E: finish the step, answer" not in taken
    assert sum(taken.values()) == pytest.approx(IN_TURN["first_content"] - 10.0)


def test_a_missing_stamp_leaves_its_time_to_the_next_phase():
    events = {event: at for event, at in IN_TURN.items() if event != "encoded"}

    taken = phases(DISAGGREGATED, events, sent=10.0)

    assert "E: vision tower" not in taken
    assert taken["E: put into the arena"] == pytest.approx(0.02)


@pytest.mark.parametrize("milestones", [DISAGGREGATED, MONOLITH, DIRECT])
def test_groups_add_up_to_the_phases(milestones):
    taken = phases(milestones, IN_TURN, sent=10.0)

    assert sum(groups(milestones, taken).values()) == pytest.approx(sum(taken.values()))


def test_phase_names_are_unique():
    names = [milestone.phase for milestone in DISAGGREGATED]

    assert len(set(names)) == len(names)


def test_hidden_durations_need_both_stamps():
    assert "put to event at P" in hidden(IN_TURN)
    assert hidden({"feature_put": 1.0}) == {}
