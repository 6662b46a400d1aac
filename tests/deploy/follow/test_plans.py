"""Other groups for other work: asked for once what comes has moved, and made only where that pays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import pytest

from deploy.follow.follower import failed, moved, step
from deploy.follow.planning import answer, by_bounds, sample, task_of
from deploy.follow.plans import Answer, Plans
from deploy.follow.types import Decision, Limits, Memory, Observation, PlanQuestion
from deploy.planner.goodput import Interval
from deploy.planner.profile import DeviceProfile
from deploy.planner.workload import Work
from epd_serve.layout_parser import parse
from epd_serve.sim.profile import Capacity, Line, Profile
from epd_serve.slo import Slo

PROFILE = DeviceProfile(
    "m",
    "d",
    {1: Profile(Line(0.02, 0.001), Line(0.01, 0.0005), decode_step_s=((1, 0.02), (8, 0.03)), capacity=Capacity(8))},
)
LOOSE = Slo(60_000, 2_000)
SIZES = {"text": Work(0, 0, 100, 200), "media": Work(2, 800, 900, 8)}
TEXT, MEDIA = {"text": 4.0, "media": 0.0}, {"text": 0.0, "media": 4.0}
LIMITS = Limits(devices=2, quiet_s=3600.0)
WORTH = {"EP-D": Interval(6.0, 5.5, 6.5), "2EPD": Interval(2.0, 1.8, 2.2)}


class World:
    """Two devices, of which all is used, so that no other move helps."""

    def __init__(self, layout: str = "2EPD", plans: Plans | None = Plans(PROFILE, LOOSE), limits: Limits = LIMITS):
        self.layout, self.plans, self.limits = layout, plans, limits
        self.memory, self.now_s, self.start_s = Memory(), 0.0, 4.0

    def sees(self, rates: Mapping[str, float], decisions: int = 8) -> Decision:
        """Returns the last decision; what is chosen is done, what is asked waits for `answers`."""
        for _ in range(decisions):
            self.now_s += self.limits.every_s
            came = {kind: round(10 * rate) for kind, rate in rates.items()}
            costs = {kind: dict.fromkeys(("EPD", "EP", "D"), 0.1) for kind in rates}
            seen = Observation(self.now_s, parse(self.layout), 10.0, came, costs, start_s=self.start_s, sizes=SIZES)
            self.memory, decision = step(seen, self.memory, self.limits, self.plans)
            if decision.chosen is not None:
                self.memory = moved(decision, self.memory, self.limits)
                self.layout = decision.chosen.layout
                break
        return decision

    def answers(self, decision: Decision, goodputs: Mapping[str, Interval], trouble: str = "") -> None:
        assert decision.question is not None and self.plans is not None
        self.plans = self.plans.with_answer(Answer(decision.question, goodputs, trouble))


def turned(world: World, before: Mapping[str, float] = TEXT, after: Mapping[str, float] = MEDIA) -> Decision:
    """The decision that asks, once the work has turned."""
    assert world.sees(before).question is None
    return world.sees(after)


def test_work_that_stays_what_it_is_asks_nothing() -> None:
    world = World()
    decision = world.sees(TEXT, 200)
    assert decision.question is None and "chosen for such work" in decision.plan


def test_while_the_mix_is_moving_nobody_is_asked_and_then_for_what_it_has_become() -> None:
    world = World()
    world.sees(TEXT)
    asked = [world.sees(MEDIA, 1) for _ in range(12)]
    assert asked[0].question is None and "changing" in asked[0].plan
    question = asked[-1].question
    assert question is not None and question.layout == "2EPD"
    assert question.rates["media"] > 9 * question.rates["text"]


def test_a_layout_that_serves_more_of_what_comes_is_chosen_and_left_again_once_it_turns_back() -> None:
    world = World()
    world.answers(turned(world), WORTH)
    move = world.sees(MEDIA).chosen
    assert move is not None and (move.what, move.layout) == ("relayout", "EP-D")
    assert move.before == pytest.approx(3 * move.after)
    back = world.sees(TEXT, 12)
    assert back.question is not None and back.question.layout == "EP-D"
    world.answers(back, {"2EPD": Interval(7.0, 6.5, 7.5), "EP-D": Interval(3.0, 2.5, 3.5)})
    world.sees(TEXT)
    assert world.layout == "2EPD"
    world.sees(MEDIA, 12)
    assert world.layout == "EP-D", "the first answer is remembered"


@pytest.mark.parametrize(
    ("goodputs", "says"),
    [
        ({"EP-D": Interval(2.2, 2.15, 2.25), "2EPD": Interval(2.0, 1.9, 2.1)}, "not worth a change"),
        ({"EP-D": Interval(3.0, 2.0, 4.0), "2EPD": Interval(2.0, 1.8, 2.2)}, "not worth a change"),
        ({"2EPD": Interval(6.0, 5.5, 6.5), "EP-D": Interval(2.0, 1.8, 2.2)}, "none serve more than 2EPD"),
        ({"EP-D": Interval(90.0, 89.0, 91.0), "2EPD": Interval(60.0, 59.0, 61.0)}, "too few more for a change to pay"),
    ],
    ids=["less than the gain", "within its interval", "the best one", "all is served as it is"],
)
def test_what_is_not_worth_it_is_left_with_the_reason(goodputs: Mapping[str, Interval], says: str) -> None:
    world = World()
    world.answers(turned(world), goodputs)
    decisions = [world.sees(MEDIA, 1) for _ in range(3)]
    assert any(says in one.plan for one in decisions) and world.layout == "2EPD"
    assert all(one.question is None for one in decisions)


def test_starts_that_take_too_long_do_not_pay() -> None:
    world = World()
    world.start_s = 2000.0
    world.answers(turned(world), WORTH)
    assert "too few more" in world.sees(MEDIA).plan and world.layout == "2EPD"


def test_what_serves_as_well_and_is_of_the_scenario_is_preferred() -> None:
    strict = Slo(1.0, 20.5)
    world = World("2EPD", Plans(PROFILE, strict))
    decision = turned(world)
    assert decision.question is not None and decision.question.mix.scenario == "(E-P)-D"
    world.answers(decision, {**WORTH, "(E-P)-D": Interval(5.4, 4.9, 5.9)})
    assert world.sees(MEDIA).chosen is not None and world.layout == "(E-P)-D"


@pytest.mark.parametrize(
    ("slo", "scenario"),
    [(Slo(1, 20), "(E-P)-D"), (Slo(1, 5000), "(E-D)-P"), (Slo(90_000, 5000), "(E-PD)"), (Slo(90_000, 20), "")],
)
def test_the_scenario_follows_from_the_objective(slo: Slo, scenario: str) -> None:
    assert Plans(PROFILE, slo).mix(MEDIA, SIZES).scenario == scenario
    assert Plans(PROFILE, slo).mix(TEXT, SIZES).scenario == "", "nobody encodes text"


def test_least_counts_forbid_layouts_without_them() -> None:
    world = World(limits=Limits(devices=2, least={"EPD": 1}))
    world.answers(turned(world), WORTH)
    assert "none serve more than 2EPD" in world.sees(MEDIA, 1).plan and world.layout == "2EPD"


def test_what_could_not_be_reached_rests_and_is_tried_again_without_another_question() -> None:
    world = World()
    world.answers(turned(world), WORTH)
    assert world.sees(MEDIA).chosen is not None
    world.memory, world.layout = failed("EP-D", world.now_s, world.memory), "2EPD"
    rests = world.sees(MEDIA)
    assert rests.chosen is None and rests.question is None and "it failed" in rests.refused[0][1]
    world.sees(MEDIA, 200)
    assert world.layout == "EP-D"


def test_without_a_profile_the_decision_says_so() -> None:
    decision = World(plans=None).sees(MEDIA)
    assert decision.question is None and "no profile" in decision.plan


def test_a_planner_in_trouble_is_not_asked_the_same_again() -> None:
    world = World()
    world.answers(turned(world), {}, trouble="one request alone takes longer")
    decision = world.sees(MEDIA)
    assert decision.question is None and "one request alone takes longer" in decision.plan


def test_other_groups_know_nothing_of_what_was_needed_before() -> None:
    world = World(limits=Limits(devices=2, quiet_s=20.0))
    world.sees(TEXT, 20)
    world.layout = "EP-D"
    assert set(world.sees(TEXT, 1).peak) == {"EP", "D"}
    assert world.memory.since_s == world.now_s and len(world.memory.needs) == 1


def question(layout: str, slo: Slo = LOOSE) -> tuple[PlanQuestion, Plans]:
    plans = Plans(PROFILE, slo)
    rates = {"text": 1.0, "media": 3.0}
    return PlanQuestion(layout, rates, SIZES, plans.mix(rates, SIZES)), plans


def test_the_sample_is_of_the_kinds_and_sizes_that_come() -> None:
    found = sample(task_of(*question("EP-D")))
    media = [one for one in found if one.items]
    assert len(media) / len(found) == pytest.approx(0.75, abs=0.06)
    assert {(one.prompt_tokens, one.item_tokens, one.output_tokens) for one in media} == {(900, 800, 8)}


def test_bounds_answer_at_once() -> None:
    began = time.monotonic()
    found = by_bounds(task_of(*question("6EPD-5P-5D")), 0.7)
    assert time.monotonic() - began < 2.0 and "6EPD-5P-5D" in found
    assert list(found.values()) == sorted(found.values(), key=lambda one: -one.value)


async def test_the_planner_answers_from_a_process_of_its_own() -> None:
    found = await answer(*question("EP-D", Slo(2000.0, 100.0)))
    assert not found.trouble and "EP-D" in found.goodputs and len(found.goodputs) > 1
    best = next(iter(found.goodputs.values()))
    assert best.value >= found.goodputs["EP-D"].value > 0


async def test_an_objective_that_nothing_keeps_is_said_to_be_one() -> None:
    found = await answer(*question("EP-D", Slo(1.0, 1.0)))
    assert "serves anything within" in found.trouble


async def test_whoever_is_cancelled_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    start = asyncio.create_subprocess_exec

    async def started(*command: str, **options: int) -> asyncio.subprocess.Process:
        made.append(await start(*command, **options))
        return made[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    task = asyncio.create_task(answer(*question("EP-D")))
    while not made:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made[0].returncode is not None
