"""The planner's answers: by bounds, in milliseconds, or by simulation in a process of its own, which takes only what is
left of a machine that serves.

    python -m deploy.follow.planning < TASK > GOODPUTS      both as JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from dataclasses import replace

import msgspec

from deploy.change.types import Kind
from deploy.follow.plans import Answer, Plans, family_of, mean_work
from deploy.follow.types import Limits, PlanQuestion
from deploy.planner import choice
from deploy.planner.candidates import candidate, candidates
from deploy.planner.goodput import Goal, Interval
from deploy.planner.profile import DeviceProfile
from deploy.planner.workload import Work, Workload
from epd_serve.errors import ConfigError
from epd_serve.image_tokens import ByArea
from epd_serve.layout_parser import parse
from epd_serve.slo import Slo
from epd_serve.traffic import Item, Request

SAMPLE = 512
"""Requests that stand for those that come."""
DEADLINE_S = 120.0
NICE = 19


class Task(msgspec.Struct, frozen=True):
    """A question with all that its answer follows from."""

    layout: str
    rates: dict[Kind, float]
    sizes: dict[Kind, Work]
    scenario: str
    profile: DeviceProfile
    slo: Slo


def task_of(question: PlanQuestion, plans: Plans) -> Task:
    rates, sizes = dict(question.rates), dict(question.sizes)
    return Task(question.layout, rates, sizes, question.mix.scenario, plans.profile, plans.slo)


def by_bounds(task: Task, use: float) -> dict[str, Interval]:
    """What layouts serve while their busiest group is used so much; the best first."""
    work, present = mean_work(task.rates, task.sizes), parse(task.layout)
    found = [*candidates(present.device_count, task.profile, work), candidate(present, task.profile, work)]
    ranked = sorted(found, key=lambda one: -one.bound_rps)
    return {str(one.layout): Interval.of([use * one.bound_rps]) for one in ranked}


def by_plan(task: Task) -> dict[str, Interval]:
    """Goodputs of the planner's finalists, of the scenario's best layout, and of the present one; the best first.

    Raises:
        ConfigError: nothing serves such requests within the objective.
    """
    workload = Workload("recent", ByArea(), sample(task))
    devices = parse(task.layout).device_count
    question = choice.Question(Goal(workload, task.slo), task.profile, devices)
    goodputs = {str(one.layout): one.goodput for one in choice.plan(question, processes=1).choices}
    for layout in (task.layout, _advised(task, workload.work)):
        if layout and layout not in goodputs:
            goodputs[layout] = _goodput_of(layout, question)
    return dict(sorted(goodputs.items(), key=lambda one: -one[1].value))


def sample(task: Task) -> list[Request]:
    """Requests of the kinds that come, in their proportions, each of the mean size of its kind."""
    chance = random.Random(0)
    kinds, at_s, made = list(task.rates), 0.0, []
    for number, kind in enumerate(chance.choices(kinds, [task.rates[kind] for kind in kinds], k=SAMPLE)):
        work = task.sizes[kind]
        count = int(work.items + chance.random())  # a mean of 1.5 is one or two
        items = (Item(round(work.item_tokens / work.items)),) * count if count else ()
        text_tokens = max(1, round(work.prompt_tokens - work.item_tokens))
        prompt_tokens = text_tokens + sum(item.tokens for item in items)
        made.append(Request(str(number), at_s, prompt_tokens, max(1, round(work.output_tokens)), items))
        at_s += chance.expovariate(1.0)
    return made


def _advised(task: Task, work: Work) -> str:
    """The layout of the scenario's groups that can serve most."""
    if not task.scenario:
        return ""
    wanted = family_of(parse(task.scenario))
    found = candidates(parse(task.layout).device_count, task.profile, work)
    return next((str(one.layout) for one in found if family_of(one.layout) == wanted), "")


def _goodput_of(layout: str, question: choice.Question) -> Interval:
    try:
        (found,) = choice.plan(replace(question, layouts=(layout,)), processes=1).choices
    except ConfigError:  # it serves nothing within the objective
        return Interval(0.0, 0.0, 0.0)
    return found.goodput


def answer_by_bounds(question: PlanQuestion, plans: Plans) -> Answer:
    """In the simulator, where a group that is used so much is reckoned to keep the objective."""
    return Answer(question, by_bounds(task_of(question, plans), Limits.use))


def answer_by_plan(question: PlanQuestion, plans: Plans) -> Answer:
    """Here, in seconds to minutes."""
    try:
        return Answer(question, by_plan(task_of(question, plans)))
    except ConfigError as error:
        return Answer(question, trouble=error.message)


async def answer(question: PlanQuestion, plans: Plans) -> Answer:
    """Of a process of its own, which ends by the deadline, or when this is cancelled."""
    command = [sys.executable, "-m", "deploy.follow.planning"]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(DEADLINE_S):
            said, complained = await child.communicate(msgspec.json.encode(task_of(question, plans)))
    except TimeoutError:
        return Answer(question, trouble=f"it took more than {DEADLINE_S:g} s")
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode:
        lines = complained.decode(errors="replace").strip().splitlines()
        return Answer(question, trouble=lines[-1] if lines else f"it ended with {child.returncode}")
    return Answer(question, msgspec.json.decode(said, type=dict[str, Interval]))


def main() -> None:
    os.nice(NICE)
    signal.alarm(round(DEADLINE_S))  # also where whoever asked has died
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    try:
        sys.stdout.buffer.write(msgspec.json.encode(by_plan(task)))
    except ConfigError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
