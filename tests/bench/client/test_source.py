"""Where requests come from: new ones for every run, so that no rate is served from the caches of the one before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from bench.client.measure import Plan
from bench.client.source import CLOSED_LOOP_REQUESTS, FileSource, WorkloadSource
from bench.workloads.arrivals import ClosedLoop, Poisson
from bench.workloads.spec import RequestSpec

OPEN = Plan(Poisson(10.0), seconds=5.0)


def specs(seed: int) -> Iterator[RequestSpec]:
    return (RequestSpec(f"w-{seed}-{n}", "q", (), 4, 1) for n in itertools.count())


def workload(**more: bool) -> WorkloadSource:
    return WorkloadSource(specs, lambda ref: "", "m", 7, **more)


def names(source: WorkloadSource, plan: Plan, number: int) -> list[str]:
    return [name for name, _ in source.of_run(plan, number).bodies]


def test_a_workload_gives_as_many_requests_as_there_are_moments():
    requests = workload().of_run(OPEN, 0)

    assert requests.dues == OPEN.dues()
    assert [name for name, _ in requests.bodies] == [f"w-7-{n}" for n in range(len(OPEN.dues()))]


def test_the_next_run_has_other_requests_unless_the_same_are_wanted():
    assert names(workload(), OPEN, 1)[0] == "w-8-0"
    assert names(workload(repeats=True), OPEN, 1)[0] == "w-7-0"
    assert workload(repeats=True).of_run(OPEN, 1).repeats
    assert not workload().of_run(OPEN, 1).repeats


def test_a_count_ends_an_open_run_too():
    assert len(names(workload(), replace(OPEN, count=3), 0)) == 3
    assert len(replace(OPEN, count=3).dues()) == 3


def test_a_closed_loop_has_requests_without_moments():
    requests = workload().of_run(Plan(ClosedLoop(2), seconds=1.0), 0)

    assert requests.dues is None
    assert len(list(requests.bodies)) == CLOSED_LOOP_REQUESTS


def test_a_file_says_when_its_bodies_are_sent_again():
    file = FileSource([("a", {})])

    assert file.of_run(OPEN, 0).repeats
    assert file.of_run(replace(OPEN, count=1), 1).repeats
    assert not file.of_run(replace(OPEN, count=1), 0).repeats
