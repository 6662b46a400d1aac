"""`(E-PD)` with core shares, on real stages: each keeps to its cores, whoever dies, and answers as plain vLLM does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.host import processes
from tests.e2e.bodies import Body, ask, chat, fresh
from tests.e2e.serving import Serving
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="core shares on CPU need two cores"),
]
Solo = Callable[[Body], list[list[int]]]
halves = pytest.mark.parametrize("launch", [("(E-PD)", "--core-share", "E=0.5,PD=0.5")], indirect=True)


def cores(launch: Serving, name: str) -> set[int]:
    """As `/instances` says, compared with where the threads of the stage that are pinned may really run."""
    (grant,) = launch.instances()[name]["cores"]
    assert grant["enforced"] and grant["cores"] == {"cpu": len(grant["ids"])}
    assert set().union(*pinned_threads(launch.stage_pid(name))) == set(grant["ids"])
    return set(grant["ids"])


def pinned_threads(group: int) -> list[set[int]]:
    """Affinity of each thread of a stage that may not run everywhere. The API server floats."""
    found = []
    for process in processes.group_members(group):
        for thread in Path(f"/proc/{process.pid}/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                found.append(os.sched_getaffinity(int(thread.name)))
    return [affinity for affinity in found if affinity != os.sched_getaffinity(0)]


@halves
def test_each_stage_computes_on_cores_of_its_own(launch: Serving, solo_answer: Solo) -> None:
    body = fresh(504)
    assert ask(launch, body) == solo_answer(body)
    encoder, model = cores(launch, "E0"), cores(launch, "PD0")
    assert encoder and model and not encoder & model
    assert encoder | model <= os.sched_getaffinity(0)


@halves
def test_a_neighbour_that_dies_comes_back_to_its_cores_and_takes_nobody_down(
    launch: Serving, solo_answer: Solo
) -> None:
    text, picture = chat("Hello", max_tokens=8), fresh(505)
    before, mine, neighbours = launch.instances(), cores(launch, "E0"), cores(launch, "PD0")
    launch.signal_stage("E0", signal.SIGKILL)
    wait_for(lambda: not launch.instances()["E0"]["up"], "the death to be noticed", 30)
    answered = 0
    while not launch.instances()["E0"]["up"]:
        assert ask(launch, text) == solo_answer(text)
        answered += 1
    assert answered, "text is answered while E0 starts"
    after = launch.instances()
    assert after["E0"]["incarnation"] != before["E0"]["incarnation"]
    assert after["PD0"]["incarnation"] == before["PD0"]["incarnation"]
    assert (cores(launch, "E0"), cores(launch, "PD0")) == (mine, neighbours)
    encoded = launch.counters("E0").get("put", 0)
    assert ask(launch, picture) == solo_answer(picture)
    wait_for(lambda: launch.counters("E0").get("put", 0) > encoded, "E0 to report that it encoded", 10)
