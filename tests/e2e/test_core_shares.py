"""`(E-PD)` with core shares, on real stages: each keeps to its cores, whoever dies, and answers as plain vLLM does."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import msgspec
import pytest

from deploy.host import processes
from epd_serve.peers import Peer, write_peers
from npu_ops.core_grants import read_grants
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


@halves
def test_stages_change_their_cores_while_they_answer(launch: Serving, solo_answer: Solo) -> None:
    """They are told as the agent tells them. With two cores there is one division, so each takes the other's core, then
    both have both, and in the end each has its own again."""
    mine, neighbours = cores(launch, "E0"), cores(launch, "PD0")
    both = mine | neighbours
    asked = [chat("Hello", max_tokens=24), *(fresh(number) for number in range(506, 512))]
    expected = [solo_answer(body) for body in asked]
    before = launch.instances()
    told = msgspec.json.decode((launch.run / "peers.json").read_bytes(), type=list[Peer])
    over, answered = Event(), list[int]()

    def keep_asking(first: int) -> None:
        for number in itertools.count(first):
            at = number % len(asked)
            assert ask(launch, asked[at]) == expected[at]
            answered.append(at)
            if over.is_set():
                return

    with ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(keep_asking, first) for first in range(3)]
        try:
            for encoder, model in ((neighbours, mine), (both, both), (mine, neighbours)):
                where = {"E0": encoder, "PD0": model}
                write_peers((launch.run / "peers.json"), [_on(peer, where[peer.instance]) for peer in told])
                for name, wanted in where.items():
                    wait_for(partial(_computes_on, launch, name, wanted), f"{name} to move", 10)
                    pinned = pinned_threads(launch.stage_pid(name))
                    assert all(affinity == wanted for affinity in pinned) and bool(pinned) is (wanted != both)
                seen = len(answered)
                wait_for(lambda seen=seen: len(answered) > seen + 12, "answers on these cores", 60)
        finally:
            over.set()
            write_peers((launch.run / "peers.json"), told)
    for one in asking:
        one.result()
    after = launch.instances()
    assert all(after[name]["incarnation"] == before[name]["incarnation"] for name in before)
    assert (cores(launch, "E0"), cores(launch, "PD0")) == (mine, neighbours)


def _on(peer: Peer, where: set[int]) -> Peer:
    return msgspec.structs.replace(peer, cores=tuple(sorted(where)), core_share=0.5)


def _computes_on(launch: Serving, name: str, where: set[int]) -> bool:
    """As its worker says it."""
    (grant,) = read_grants(str(launch.run / f"{name}.cores{{rank}}.json"), 1)
    return set(grant.core_ids) == where
