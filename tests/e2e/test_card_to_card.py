"""`--feature-transfer device` on real stages, over Mooncake's TCP: encoders write features to who prefills.

Whether a write is in time is the machine's business: a request goes the store's way then, and its tokens are the same.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.bodies import SOLO, Body, ask, fresh
from tests.e2e.serving import Serving, recomputed
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
pytestmark = [pytest.mark.slow, pytest.mark.mooncake]
WRITES = ("--feature-transfer", "device")
e_p_d = pytest.mark.parametrize("launch", [("E-P-D", *WRITES)], indirect=True, ids=["E-P-D"])


def came(launch: Serving, instance: str, way: str) -> int:
    return launch.settled_counters(instance).get(way, 0)


@e_p_d
@pytest.mark.parametrize("name", ["one picture", "three pictures of different sizes"])
def test_tokens_are_plain_vllms(launch: Serving, solo_answer: Solo, name: str) -> None:
    assert ask(launch, SOLO[name]) == solo_answer(SOLO[name])


@e_p_d
def test_features_are_written_by_their_encoder_and_the_store_has_them_too(launch: Serving, solo_answer: Solo) -> None:
    before = came(launch, "P0", "pushed")
    for number in range(940, 948):
        assert ask(launch, fresh(number)) == solo_answer(fresh(number))
    counters = launch.settled_counters("P0")
    assert counters["pushed"] > before, counters
    assert not counters.get("push_failed") and not recomputed(counters)
    encoder = launch.settled_counters("E0")
    assert encoder["put"] >= encoder["encoded"]


@e_p_d
@pytest.mark.parametrize("killed", ["E0", "P0"])
def test_a_kill_amid_writes_costs_no_answer(launch: Serving, solo_answer: Solo, killed: str) -> None:
    first = 950 if killed == "E0" else 960
    bodies = [fresh(number) for number in range(first, first + 4)]
    alone = [solo_answer(body) for body in bodies]
    encoded, pid = came(launch, "E0", "encoded"), launch.stage_pid(killed)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(ask, launch, body) for body in bodies]
        wait_for(lambda: launch.counters("E0").get("encoded", 0) > encoded or answers[0].done(), "the first", 20)
        launch.signal_stage(killed, signal.SIGKILL)
        assert [answer.result(timeout=170) for answer in answers] == alone
    wait_for(lambda: launch.stage_pid(killed) != pid and launch.healthy(), f"{killed} to be back", 180)
    before = came(launch, "P0", "pushed")
    for number in range(first + 4, first + 8):
        assert ask(launch, fresh(number)) == solo_answer(fresh(number))
    assert came(launch, "P0", "pushed") > before, "its next life writes, or is written to"


@pytest.mark.parametrize("launch", [("E-P:tp2-D", *WRITES)], indirect=True, ids=["E-P:tp2-D"])
def test_every_rank_is_written_to(launch: Serving, solo_answer: Solo) -> None:
    body = SOLO["three pictures of different sizes"]
    assert ask(launch, body) == solo_answer(body)
    assert came(launch, "P0", "pushed") > 0
