"""What became of a move: who of the new ones works, and predictions beside what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.follow.outcome import ENOUGH, MEASURED_S, PROOF_S, Gain, Outcome, Working, median_error
from deploy.follow.types import Decision, Move, Observation
from epd_serve.layout_parser import parse
from epd_serve.roles import Role

COSTS = {"text": {"E": 0.0, "D": 0.2}, "media": {"E": 0.8, "D": 0.1}}
MOVE = Move("scale", "2E-D", {"E": 2, "D": 1}, "E", 2.0, 1.0, "")
DECISION = Decision(0.0, "E-D", {}, {}, {}, MOVE, costs=COSTS)
SEEN = Observation(0.0, parse("2E-D"), 10.0, {"text": 10, "media": 10}, COSTS, busy={"E": 1.0, "D": 0.5})


def after(outcome: Outcome, seconds: float, seen: Observation = SEEN) -> Outcome:
    at_s = outcome.done_s
    while at_s < outcome.done_s + seconds:
        at_s += 5.0
        assert outcome.look(replace(seen, at_s=at_s), 0.7)
    return outcome


def test_what_was_predicted_is_for_the_load_that_came() -> None:
    assert after(Outcome(DECISION, 0.0), MEASURED_S - 5).gain() is None
    gain = after(Outcome(DECISION, 0.0), MEASURED_S).gain()
    assert gain == Gain("scale", "E", pytest.approx(0.8 / 2), pytest.approx(0.5))
    twice = after(Outcome(DECISION, 0.0), MEASURED_S, replace(SEEN, came={"media": 20})).gain()
    assert twice is not None and twice.predicted == pytest.approx(0.8)


def test_what_waited_at_the_end_of_the_change_is_work_that_came() -> None:
    waits = after(Outcome(DECISION, 0.0), MEASURED_S, replace(SEEN, backlog={"E": 12.0})).gain()
    assert waits is not None and waits.predicted == pytest.approx((0.8 + 12.0 / MEASURED_S) / 2)


def test_of_other_groups_the_busiest_is_measured_by_what_the_profile_says() -> None:
    move = replace(MOVE, what="relayout", layout="P-D", counts={"P": 1, "D": 1}, relieves="EPD")
    costs = {"text": {"P": 0.3, "D": 0.6}}
    seen = Observation(0.0, parse("P-D"), 10.0, {"text": 10}, costs, busy={"P": 0.3, "D": 0.4})
    gain = after(Outcome(replace(DECISION, chosen=move), 0.0), MEASURED_S, seen).gain()
    assert gain == Gain("relayout", "D", pytest.approx(0.6), pytest.approx(0.4))


def test_another_layout_ends_it() -> None:
    assert not Outcome(DECISION, 0.0).look(replace(SEEN, at_s=5.0, layout=parse("3E-D")), 0.7)


def proof(now: dict[str, Working], seconds: float = PROOF_S, came: int = 10) -> str | None:
    before = {"E0": Working(Role.E, 100.0), "D0": Working(Role.D, 7.0)}
    outcome = Outcome(DECISION, 0.0, {"E1": Role.E}, before)
    return after(outcome, seconds, replace(SEEN, came={"text": 50, "media": came})).trouble(now)


def test_who_is_new_has_to_work_once_enough_came_for_all_of_its_kind() -> None:
    e0, works, idle = Working(Role.E, 200.0), Working(Role.E, 5.0), Working(Role.E, 0.0)
    assert proof({"E0": e0, "E1": works}) == ""
    assert "E1 was given nothing" in (proof({"E0": e0, "E1": idle}) or "")
    assert proof({"E0": e0, "E1": idle}, seconds=PROOF_S - 5) is None
    assert proof({"E0": e0, "E1": idle}, came=ENOUGH) is None, "one more may be the next one's"


def test_where_nobody_of_the_kind_got_anything_nobody_is_to_blame() -> None:
    assert proof({"E0": Working(Role.E, 100.0), "E1": Working(Role.E, 0.0)}) is None


def test_who_serves_in_another_role_or_not_at_all_did_not_change() -> None:
    e0 = Working(Role.E, 200.0)
    assert "E1 serves as P, not as E" in (proof({"E0": e0, "E1": Working(Role.P, 9.0)}) or "")
    assert "no front door" in (proof({"E0": e0, "E1": Working(Role.E, 9.0, up=False)}) or "")
    assert proof({"E0": e0}) == "", "it has died, and is started again"


def test_errors_are_relative_to_what_was_measured() -> None:
    gains = [Gain("scale", "E", predicted, 0.5) for predicted in (0.5, 0.6, 0.8)]
    assert median_error(gains) == pytest.approx(0.2)
    assert median_error([]) is None
