"""Which layout: candidates simulated, ranked, and why the first is before the second.

First every candidate with one seed, then the best of them, and the best monolith, with all seeds and in more than one
way to run them (budgets per step, smaller batches), because a difference that is only chance is none. Simulations are
shared out over processes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from deploy.planner.candidates import Candidate, batch_within, candidate, candidates
from deploy.planner.fleet import Options
from deploy.planner.goodput import CLOSE, Goal, Interval, Times, goodput, part_of, serves, times_of
from deploy.planner.profile import DeviceProfile
from deploy.planner.simulate import check_simulated
from epd_serve.errors import ConfigError
from epd_serve.layout import Group, Layout
from epd_serve.layout_parser import parse
from epd_serve.placement import check_servable
from epd_serve.roles import Role

FINALISTS, AT_A_TIME = 3, 4
START = 0.5
"""Of its bound: most layouts serve something near it within an SLO."""
AS_WELL = 0.98
"""Of the best goodput, from which on a monolith is said to serve as well: it is the simpler thing to run."""
BEYOND = 1.1
"""Of its goodput, where it is seen what a layout ends at, and ways to run it are compared."""
UNUSED = 0.9
"""Of its goodput, at which a layout's times are told."""


@dataclass(frozen=True)
class Question:
    """What is planned for.

    Attributes:
        devices: all of them are used; with a rate as few as will do.
        rate_rps: that comes; None ranks by how much can be served.
        price: of a device, an hour; 0 where cost does not matter.
        survive: so many instances of the same kind may be lost, whichever it is, and what is left counts.
        layouts: those alone are looked at; () leaves it to the families.
        seeds: simulated of each finalist.
    """

    goal: Goal
    profile: DeviceProfile
    devices: int
    rate_rps: float | None = None
    price: float = 0.0
    survive: int = 0
    layouts: tuple[str, ...] = ()
    seeds: int = 3


@dataclass(frozen=True)
class Choice:
    """A layout with how it is run.

    Attributes:
        options: of the simulation, which are options of the deployment, too.
        goodput: requests a second within the SLO, of all devices.
        survived: the same once instances are lost; equal to it where none may be.
        rate_rps: at which `times` are: the one that comes, or a little below the goodput.
        enough: it serves the rate that comes.
    """

    layout: Layout
    options: Options
    goodput: Interval
    survived: Interval
    rate_rps: float
    times: Times
    price: float = 0.0
    enough: bool = True

    @property
    def monolith(self) -> bool:
        return self.layout.roles == {Role.EPD}

    @property
    def devices(self) -> int:
        return self.layout.device_count

    @property
    def per_device(self) -> Interval:
        one = self.survived
        return Interval(one.value / self.devices, one.low / self.devices, one.high / self.devices)

    @property
    def cost(self) -> float:
        """Of a thousand requests within the SLO."""
        return 1e3 * self.devices * self.price / 3600 / self.survived.value if self.survived.value else float("inf")


@dataclass(frozen=True)
class Plan:
    """The ranking, best first, and what it is worth.

    Attributes:
        undecided: layouts whose interval meets the first one's.
        monolith: the best one, wherever it is ranked, or None.
        looked_at: how many layouts were simulated.
    """

    question: Question
    choices: tuple[Choice, ...]
    looked_at: int

    @property
    def first(self) -> Choice:
        return self.choices[0]

    @property
    def undecided(self) -> tuple[Choice, ...]:
        return tuple(one for one in self.choices[1:] if one.enough and one.per_device.meets(self.first.per_device))

    @property
    def monolith(self) -> Choice | None:
        return next((one for one in self.choices if one.monolith), None)

    @property
    def monolith_will_do(self) -> bool:
        """A monolith serves as well as anything else: within its interval, or as good as."""
        one = self.monolith
        if one is None or not one.enough:
            return False
        first = self.first.per_device
        return one.per_device.value >= AS_WELL * first.value or one.per_device.meets(first)


def plan(question: Question, processes: int | None = None) -> Plan:
    """Simulate and rank.

    Raises:
        ConfigError: no layout of so many devices is there, or none serves anything within the SLO.
    """
    found = _candidates(question)
    if not found:
        raise ConfigError(f"no layout of {question.devices} devices fits the profile", param="--devices")
    with _shared_out(question, processes) as each:
        screened = _screened(found, each)
        ranked = sorted(screened, key=lambda pair: -pair[1] / pair[0].layout.device_count)
        kept = [pair for pair in ranked[:FINALISTS] if pair[1] > 0]
        kept += [pair for pair in ranked if pair[0].monolith and pair[1] > 0 and pair not in kept][:1]
        choices = _choices(question, kept, each)
    if not choices:
        raise ConfigError(
            f"no layout of {question.devices} devices serves anything within {question.goal.slo.text}: one request "
            "alone takes longer; allow more, or profile faster devices",
            param="--slo",
        )
    return Plan(question, tuple(sorted(choices, key=_rank(question), reverse=True)), len(screened))


def _candidates(question: Question) -> list[Candidate]:
    work = question.goal.workload.work
    if question.layouts:
        layouts = [parse(text) for text in question.layouts]
        for layout in layouts:
            check_simulated(layout, question.profile)
        return [candidate(layout, question.profile, work) for layout in layouts]
    counts = range(1, question.devices + 1) if question.rate_rps else (question.devices,)
    found = [one for count in counts for one in candidates(count, question.profile, work)]
    if question.rate_rps:  # what cannot serve it by any bound is not worth a simulation, unless nothing can
        able = [one for one in found if one.bound_rps >= question.rate_rps]
        fewest = sorted(able, key=lambda one: one.layout.device_count)[: 4 * FINALISTS]
        found = fewest or [one for one in found if one.layout.device_count == question.devices]
    return found


_asked: list[Question] = []
"""Of this process: a recording is too long to be handed over with each candidate."""


@contextmanager
def _shared_out(question: Question, processes: int | None) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` whose calls run in so many processes; with one, here."""
    count = processes or len(os.sched_getaffinity(0))
    if count == 1:
        _ask(question)
        yield map
        return
    with ProcessPoolExecutor(count, get_context("forkserver"), _ask, (question,)) as pool:
        yield pool.map


def _ask(question: Question) -> None:
    _asked[:] = [question]


def _screened(found: Sequence[Candidate], each: Callable[..., Iterable[Any]]) -> list[tuple[Candidate, float]]:
    """Candidates with their goodput, some at a time, best bounds first.

    Who serves less than enough others is not looked at further, but for a monolith: not at all where that follows from
    its bound, else it is there with 0, after one run at what the last of those others serves, or just not.
    """
    screened: list[tuple[Candidate, float]] = []
    left = sorted(found, key=lambda one: -one.bound_rps / one.layout.device_count)
    while left:
        served = sorted((rps / one.layout.device_count for one, rps in screened), reverse=True)
        least = served[FINALISTS - 1] if len(served) >= FINALISTS else 0.0
        left = [one for one in left if one.monolith or one.bound_rps / one.layout.device_count > least]
        some, left = left[:AT_A_TIME], left[AT_A_TIME:]
        wanted = [(one, 0.0 if one.monolith else least * one.layout.device_count) for one in some]
        screened += zip(some, each(_screen, wanted), strict=True)
    return screened


def _screen(wanted: tuple[Candidate, float]) -> float:
    question, (one, least_rps) = _asked[0], wanted
    goal, profile, way = question.goal, question.profile, _ways(question, one)[0]
    if least_rps and not serves(goal, one.layout, profile, least_rps / CLOSE, 0, way):
        return 0.0
    return goodput(goal, one.layout, profile, START * one.bound_rps, 0, way)


def _ways(question: Question, one: Candidate) -> list[Options]:
    """To run it: with batches whose steps keep the gaps of the SLO, and with budgets per step, too; where that makes
    batches smaller than they can be, with such as well."""
    slo, kv_tokens = question.goal.slo, question.goal.workload.work.prompt_tokens
    batches: dict[str, int] = {}
    for group in one.layout.groups:
        stage = question.profile.stages[group.tp]
        most = stage.capacity.max_running
        keeps = batch_within(stage, kv_tokens, slo.tpot_ms / 1e3)
        batches |= {one.role.value: max(1, keeps) for one in group.members if one.role.decodes and keeps < most}
    ways = [Options(max_running=batches), Options(max_running=batches, budgets=slo)]
    return [*ways, Options()] if batches else ways


_Search = tuple[Layout | None, Options, float, int]
"""Of a layout's goodput: how it is run, where to begin, and the seed."""


def _choices(question: Question, kept: Sequence[tuple[Candidate, float]], each: Callable[..., Any]) -> list[Choice]:
    """Finalists, each in the best of the ways to run it. A call is one search, so that processes have as much to do."""
    noise = max(question.profile.noise.repeat, question.profile.noise.e2e)
    ways: list[tuple[Options, Times]] = list(each(_best_way, kept))
    searches: list[list[_Search]] = []
    for (one, screened_rps), (options, _) in zip(kept, ways, strict=True):
        layouts = [one.layout, *_after_losses(one.layout, question.survive)]
        seeds = range(1, question.seeds + 1)
        searches.append([(layout, options, screened_rps, seed) for layout in layouts for seed in seeds])
    found: Iterator[float] = iter(each(_searched, itertools.chain(*searches)))
    choices = []
    for (one, screened_rps), (options, beyond), own in zip(kept, ways, searches, strict=True):
        goodputs = [next(found) for _ in own]
        by_layout = [goodputs[at : at + question.seeds] for at in range(0, len(goodputs), question.seeds)]
        whole, *rest = (Interval.of(served).widened(noise) for served in by_layout)
        survived = min([whole, *rest], key=lambda interval: interval.value)
        rate_rps = question.rate_rps or UNUSED * whole.value or screened_rps
        times = _times(question, one.layout, options, rate_rps)
        times = replace(times, late=beyond.late, slow=beyond.slow)
        enough = question.rate_rps is None or survived.value >= question.rate_rps
        choices.append(Choice(one.layout, options, whole, survived, rate_rps, times, question.price, enough))
    return choices


def _best_way(finalist: tuple[Candidate, float]) -> tuple[Options, Times]:
    """With what comes of it beyond its goodput."""
    one, screened_rps = finalist
    question = _asked[0]
    ways = [(way, _times(question, one.layout, way, BEYOND * screened_rps)) for way in _ways(question, one)]
    return max(ways, key=lambda way: way[1].attained)


def _searched(search: _Search) -> float:
    layout, options, start_rps, seed = search
    goal, profile = _asked[0].goal, _asked[0].profile
    return 0.0 if layout is None else goodput(goal, layout, profile, start_rps, seed, options)


def _times(question: Question, layout: Layout, options: Options, rate_rps: float) -> Times:
    goal, (part, times) = question.goal, part_of(layout)
    return times_of(goal.run(part, question.profile, rate_rps / times, 1, options), goal)


def _after_losses(layout: Layout, losses: int) -> list[Layout | None]:
    """What is left where so many instances of one kind are lost, for each kind; None where nothing serves any more.

    Losses of several kinds leave no less: capacity is concave in the counts of kinds, so least where all are of one.
    """
    if not losses:
        return []
    left: list[Layout | None] = []
    for at, group in enumerate(layout.groups):
        groups: list[Group] = [*layout.groups]
        if group.repeat > losses:
            groups[at] = replace(group, repeat=group.repeat - losses)
        else:
            del groups[at]
        rest = Layout.of(groups)
        try:
            check_servable(rest)
            left.append(rest if groups else None)
        except ConfigError:
            left.append(None)
    return left


def _rank(question: Question) -> Callable[[Choice], tuple[float, ...]]:
    """With a rate: who serves it, by fewest devices, then by how much more; else by goodput a device."""

    def key(one: Choice) -> tuple[float, ...]:
        if question.rate_rps:
            return (one.enough, -one.devices if one.enough else 0, one.survived.value)
        return (one.per_device.value,)

    return key
