"""kill -9 of E, P and D, in processes of their own, in every state of a feature: nobody else waits beyond its deadline,
what is whole stays, what the dead held is given back, and a successor goes on."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.features import State
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.engine.ec.step import FeatureStep
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from store.arena import Arena
from store.errors import StoreFullError
from tests.epd_serve.engine.ec.stages import CAPACITY, Stages, feature, needed
from tests.epd_serve.engine.ec.vllm_stub import GRID
from tests.waiting import PATIENCE_S, wait_for

WAIT_S = 1.0
MOST_S = WAIT_S + 3.0 + 2.0
"""A feature's deadline, its last look, and what a machine with two cores takes besides."""
SERVERS = multiprocessing.get_context("forkserver")
SERVERS.set_forkserver_preload([__name__])


def serve(pipe: Connection, wiring: StageWiring) -> None:
    """One stage's part: answers calls of the test until it is killed."""
    part = FeatureProducer(wiring) if wiring.role is Role.E else FeatureConsumer(wiring)
    calls: dict[str, Callable[..., Any]] = {"encodes": encodes, "fails": fails, "begins": begins, "stores": stores}
    calls |= {"state": state, "settled": settled, "early": early, "uses": uses, "releases": releases}
    pipe.send(None)
    while True:
        name, *given = pipe.recv()
        pipe.send(calls[name](part, *given))


# --- E ----------------------------------------------------------------------------------------------------------------


def encodes(e: FeatureProducer, key: str) -> None:
    e.step(needed(key, **GRID), {})


def begins(e: FeatureProducer, key: str) -> None:
    """Dies in the middle of a put."""
    assert e._pool.arena.reserve(key, 64) is not None


def stores(e: FeatureProducer, key: str) -> None:
    e.save({key: feature()}, key)


def fails(e: FeatureProducer, key: str) -> None:
    e.step(FeatureStep(ended=[key]), {})


# --- P and D ----------------------------------------------------------------------------------------------------------


def state(c: FeatureConsumer, key: str) -> tuple[bool, State | None]:
    """Whether it is being made, and what is known of it."""
    with c.features.lock:
        known = c.features._rows.get(key)
        return c.features.makes(key, time.monotonic()), None if known is None else known.state


def settled(c: FeatureConsumer, request: str, key: str) -> str:
    """`""`, or how the request goes on."""
    if c.settled(request, [key]) is None:
        return ""
    return "recomputes" if c.pinned(key) is None else "reads"


def early(c: FeatureConsumer, request: str, key: str) -> bool:
    with c.features.lock:
        return c.features.early(request, key, time.monotonic())


def uses(c: FeatureConsumer, request: str, key: str) -> None:
    c.keep(request, [key])


def releases(c: FeatureConsumer, request: str) -> None:
    c.release([request])


# --- the test's side ----------------------------------------------------------------------------------------------


class Process:
    """A stage's part in a process of its own."""

    def __init__(self, wiring: StageWiring) -> None:
        self._pipe, theirs = SERVERS.Pipe()
        self._process = SERVERS.Process(target=serve, args=(theirs, wiring), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def __call__(self, name: str, *given: Any) -> Any:
        self._pipe.send((name, *given))
        return self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)
        self._pipe.close()

    def _answer(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "it does not answer"
        return self._pipe.recv()


class Launch:
    """E, P and D of one host, each killed as often as a test wants."""

    def __init__(self, stages: Stages) -> None:
        self.arena, self._stages = stages.arena, stages
        self.parts: dict[str, Process] = {}
        for role in (Role.E, Role.P, Role.D):
            self.start(role)

    def start(self, role: Role) -> None:
        hears = {} if role is Role.E else {"E0": self._stages.events("E0")}
        publish = self._stages.events("E0") if role is Role.E else ""
        wiring = self._stages.wiring(f"{role.value}0", role, hears, publish=publish, feature_wait_s=WAIT_S)
        self.parts[role.value] = Process(wiring)

    def kill_and_start(self, role: str) -> None:
        self.parts[role].kill()
        self.start(Role(role))

    def end(self) -> None:
        for part in self.parts.values():
            part.kill()


@pytest.fixture
def launch(stages: Stages) -> Iterator[Launch]:
    made = Launch(stages)
    yield made
    made.end()
    give_back(made.arena)


def give_back(arena: Arena) -> None:
    """Nothing that the dead held keeps room: the whole arena can be had."""

    def filled() -> bool:
        try:
            return arena.put("all of it", bytes(CAPACITY), shape=(CAPACITY,), dtype="uint8")
        except StoreFullError:
            return False

    wait_for(filled, "the dead's room to come back", MOST_S)


def brought_to(launch: Launch, name: str) -> None:
    """`k` is expected, wanted (its put has begun), ready (pinned at P, kept at D) or lost."""
    e, p, d = (launch.parts[role] for role in "EPD")

    def heard() -> bool:  # subscriptions take a moment
        e("encodes", "k")
        return all(part("state", "k")[0] for part in (p, d))

    wait_for(heard)
    if name == "wanted":
        assert p("settled", "r", "k") == "" and d("early", "r", "k")
        e("begins", "k")
    elif name == "ready":
        e("stores", "k")
        wait_for(lambda: p("settled", "r", "k") == "reads")
        d("uses", "r", "k")
    elif name == "lost":
        e("fails", "k")
        wait_for(lambda: p("state", "k") == (False, State.LOST))


STATES = ("expected", "wanted", "ready", "lost")


@pytest.mark.parametrize("name", STATES)
def test_nobody_waits_for_a_dead_encoder_beyond_the_deadline(launch: Launch, name: str) -> None:
    brought_to(launch, name)
    p, d = launch.parts["P"], launch.parts["D"]
    launch.kill_and_start("E")
    outcome = wait_for(lambda: p("settled", "r", "k"), "P to go on", MOST_S)
    assert outcome == ("reads" if name == "ready" else "recomputes")
    wait_for(lambda: not d("early", "r", "k"), "D to reserve", MOST_S)
    p("releases", "r")
    launch.parts["E"]("encodes", "k")  # the successor makes it anew, whatever the dead one had begun
    launch.parts["E"]("stores", "k")
    wait_for(lambda: launch.arena.contains("k"), "its writer, of which nobody may hear: it has just begun to speak")
    wait_for(lambda: p("settled", "s", "k") == "reads", "P to find it")


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("dead", ["P", "D"])
def test_a_dead_consumer_costs_others_nothing_and_its_successor_finds_what_there_is(
    launch: Launch, dead: str, name: str
) -> None:
    brought_to(launch, name)
    launch.kill_and_start(dead)
    e, other, successor = launch.parts["E"], launch.parts["D" if dead == "P" else "P"], launch.parts[dead]
    if name == "wanted":  # somebody's put has begun, and ends
        launch.kill_and_start("E")
        e = launch.parts["E"]
    if name in ("expected", "wanted"):
        e("encodes", "k")
        e("stores", "k")
        wait_for(lambda: launch.arena.contains("k"), "its writer")
    expected = "recomputes" if name == "lost" else "reads"
    for part in (other, successor):
        assert wait_for(lambda part=part: part("settled", "again", "k"), "it to go on", MOST_S) == expected
