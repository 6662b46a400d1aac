"""E, P and D on machines of their own: separate arenas, features over Mooncake Store, KV over its Transfer Engine.

The machines are loopback addresses; what crosses from one to another is what would cross a network.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.host import processes
from tests.e2e.bodies import SOLO, TWO_CHOICES, Body, about, ask, fresh, stream
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT
from tests.e2e.hosts import ADDRESSES, Hosts, hosts_serving
from tests.e2e.serving import recomputed
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
pytestmark = [pytest.mark.slow, pytest.mark.mooncake]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_serving() as serving:
        yield serving


@pytest.mark.parametrize("name", SOLO)
def test_greedy_tokens_equal_the_monoliths(hosts: Hosts, solo_answer: Solo, name: str) -> None:
    assert ask(hosts, SOLO[name]) == solo_answer(SOLO[name])


def test_the_same_picture_again_gives_the_same_answer(hosts: Hosts, solo_answer: Solo) -> None:
    body = about(PAIRWISE_DIFFERENT[6])
    assert ask(hosts, body) == ask(hosts, body) == solo_answer(body)


def test_a_stream_carries_the_same_tokens(hosts: Hosts, solo_answer: Solo) -> None:
    body = about(PAIRWISE_DIFFERENT[5])
    ids, _ = stream(hosts, body)
    assert [ids] == solo_answer(body)


def test_two_choices_equal_the_monoliths(hosts: Hosts, solo_answer: Solo) -> None:
    assert ask(hosts, TWO_CHOICES) == solo_answer(TWO_CHOICES)


def test_eight_at_a_time_each_get_the_answer_to_their_own_picture(hosts: Hosts, solo_answer: Solo) -> None:
    bodies = [about(prompt) for prompt in PAIRWISE_DIFFERENT]
    alone = [solo_answer(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: ask(hosts, body), bodies)) == alone


def test_every_machine_has_its_own_arena_and_features_cross_by_mooncake(hosts: Hosts, solo_answer: Solo) -> None:
    arenas = {name: Path(f"/dev/shm/epd-{hosts.run(name).name}-arena") for name in "EPD"}
    assert len(set(arenas.values())) == 3
    assert all(map(Path.exists, arenas.values()))

    def late_calls() -> int:
        return sum(hosts.counters(name).get("pool.late_calls", 0) for name in ("E0", "P0"))

    def crossing(number: int) -> dict[str, int]:
        """What P counts of one image: it fetched the feature, or Mooncake was late and it encoded the image itself.

        On a busy machine a read of Mooncake's may stop for seconds, and past its deadline the feature is recomputed.
        """
        before, late, moved = hosts.counters("P0"), late_calls(), dict[str, int]()

        def has_it() -> bool:
            moved.update({name: count - before.get(name, 0) for name, count in hosts.counters("P0").items()})
            return moved.get("fetched", 0) > 0 or recomputed(moved) > 0

        assert ask(hosts, fresh(number)) == solo_answer(fresh(number))
        wait_for(has_it, "P to count how it came by the feature", 30)
        changes = {name: count for name, count in moved.items() if count}
        assert not recomputed(changes) or late_calls() > late, f"{changes}, E0 {hosts.counters('E0')}"
        return changes

    crossings = [crossing(number) for number in range(640, 643)]
    assert any(changes.get("fetched") for changes in crossings), crossings


def test_a_stages_own_server_answers_its_proxy_only(hosts: Hosts) -> None:
    for name in "EPD":
        assert hosts.stage(name).get("/health").status_code == 200
        for path in ("/v1/models", "/metrics"):
            assert hosts.stage(name).get(path).status_code == 401
        for path in ("/invocations", "/v1/chat/completions", "/tokenize"):
            assert hosts.stage(name).post(path, {"model": "epd-demo", "prompt": "Hello"}).status_code == 401


def test_ports_answer_at_the_machines_own_address_only(hosts: Hosts) -> None:
    import asyncio

    from deploy.host.listeners import exposed

    for name in "EPD":
        members = [member.pid for member in processes.group_members(hosts.group(name, f"{name}0"))]
        assert asyncio.run(exposed(members, ADDRESSES[name])) == []


def test_a_killed_encoder_costs_no_answer(hosts: Hosts, solo_answer: Solo) -> None:
    before = hosts.instances()["E0"]["incarnation"]
    group = hosts.group("E", "E0")
    os.kill(group, signal.SIGKILL)
    assert ask(hosts, fresh(601)) == solo_answer(fresh(601))
    wait_for(lambda: not processes.group_members(group), "its processes to go", 10)
    assert ask(hosts, fresh(602)) == solo_answer(fresh(602))
    wait_for(hosts.complete, "E0 to be back", 180)
    assert hosts.instances()["E0"]["incarnation"] != before
    assert ask(hosts, fresh(603)) == solo_answer(fresh(603))


def test_a_killed_master_of_the_store_costs_no_answer(hosts: Hosts, solo_answer: Solo) -> None:
    master = hosts.group("head", "mooncake_master")
    os.kill(master, signal.SIGKILL)
    assert ask(hosts, fresh(604)) == solo_answer(fresh(604))
    wait_for(lambda: hosts.group("head", "mooncake_master") != master, "another master", 30)
    wait_for(lambda: hosts.instances()["P0"]["store"]["pool"] == "up", "P to reach it", 30)
    wait_for(lambda: hosts.instances()["E0"]["store"]["pool"] == "up", "E to reach it", 30)
    before = hosts.counters("P0").get("fetched", 0)
    numbers = itertools.count(620)

    def one_crossed() -> bool:
        """A pool is up for whoever has not asked it since; E's memory is the new master's when E's client noticed."""
        body = fresh(next(numbers))
        assert ask(hosts, body) == solo_answer(body)
        return hosts.counters("P0").get("fetched", 0) > before

    wait_for(one_crossed, "features to cross again", 30)


def test_a_restarted_head_finds_its_stages_and_features_cross_again(hosts: Hosts, solo_answer: Solo) -> None:
    lives = {name: entry["incarnation"] for name, entry in hosts.instances().items()}
    head = hosts.processes["head"]
    os.kill(head.pid, signal.SIGKILL)
    head.wait(timeout=10)
    hosts.start("head")
    wait_for(hosts.healthy, "the head to be back", 60)
    wait_for(hosts.complete, "the stages to join again", 30)
    assert {name: entry["incarnation"] for name, entry in hosts.instances().items()} == lives, "no stage was restarted"
    assert ask(hosts, fresh(606)) == solo_answer(fresh(606))


def test_a_machine_that_dies_comes_back_and_an_owner_of_features_that_hangs_costs_no_answer(
    hosts: Hosts, solo_answer: Solo
) -> None:
    known = fresh(608)
    assert ask(hosts, known) == solo_answer(known)
    run, agent = hosts.run("P"), hosts.processes["P"]
    group, arena = hosts.group("P", "P0"), Path(f"/dev/shm/epd-{run.name}-arena")
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait(timeout=10)
    wait_for(lambda: not processes.group_members(group), "its server to die with it", 15)
    wait_for(lambda: "P0" not in hosts.up(), "the head to notice", 10)
    hosts.start("P")
    wait_for(lambda: not run.exists() and not arena.exists(), "what it left to be cleaned up", 30)
    wait_for(hosts.complete, "P0 to be back", 180)
    assert ask(hosts, fresh(607)) == solo_answer(fresh(607))
    encoder = hosts.group("E", "E0")
    os.killpg(encoder, signal.SIGSTOP)  # its memory holds the only copy: the arena of P is a new one
    try:
        assert ask(hosts, known) == solo_answer(known)
    finally:
        os.killpg(encoder, signal.SIGCONT)
    assert ask(hosts, fresh(609)) == solo_answer(fresh(609))
