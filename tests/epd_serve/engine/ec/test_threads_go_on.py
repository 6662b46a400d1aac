"""Threads that tell of features survive what goes wrong in one turn: an encoder must not fall silent, nor stall."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epd_serve import wire
from epd_serve.engine.ec.announcer import Announcer
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from npu_ops.torch_memory import HostMemory
from store.arena import Arena
from store.feature_pool import FeaturePool
from tests.epd_serve.engine.ec.stages import Ear, Remote, Speechless, TwoTiers, feature, make_arena
from tests.waiting import wait_for


class Told:
    """What became of keys; the word about `bad` raises, as one would that cannot be encoded."""

    def __init__(self, bad: str = "", bad_event: str = "") -> None:
        self.bad, self.bad_event = bad, bad_event
        self.words: list[tuple[str, str, str]] = []

    def __call__(self, key: str, event: str, nbytes: int = 0, *, pooled: bool = False, reason: str = "") -> None:
        if key == self.bad and event in (self.bad_event or event):
            raise ValueError("this key cannot be told")
        self.words.append((key, event, reason))


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = make_arena()
    yield made
    made.close()
    made.path.unlink(missing_ok=True)


def writer_to(arena: Arena, told: Told, memory: HostMemory | None = None) -> Speechless:
    return Speechless(FeaturePool(Arena.attach(arena.path)), told, memory=memory)


def test_renewals_and_reports_go_on_after_one_that_failed(tmp_path: Path) -> None:
    failures = [ValueError("a set changed its size")]

    def pending() -> list[str]:
        if failures:
            raise failures.pop()
        return ["k"]

    address = f"ipc://{tmp_path}/E0.events"
    announcer = Announcer(
        StageWiring("E0", Role.E, "i", publish=address), lambda: wire.StoreReport("E0", "i", 1, 0, 0), pending
    )
    announcer.start()
    wait_for(lambda: not failures)
    ear = Ear(address)
    wait_for(lambda: ear.of(wire.FeaturePending) and ear.of(wire.StoreReport))
    ear.close()
    announcer.close()


def test_the_writer_goes_on_after_a_word_that_could_not_be_said(arena: Arena) -> None:
    told = Told(bad="bad")
    writer = writer_to(arena, told)
    writer.put("bad", feature())
    writer.put("good", feature())
    wait_for(lambda: told.words)
    wait_for(lambda: not writer._pending())
    writer.close()
    assert told.words == [("good", "put", "")] and arena.contains("good")


def test_features_of_a_writer_that_cannot_enter_the_device_are_announced_as_failed(arena: Arena) -> None:
    class Lost(HostMemory):
        def enter_thread(self) -> None:
            raise RuntimeError("set_device: device is lost")

    told = Told()
    writer = writer_to(arena, told, Lost())
    for key in ("one", "two"):
        writer.put(key, torch.ones(4))
    wait_for(lambda: len(told.words) == 2)
    wait_for(lambda: not writer._pending())
    writer.close()
    assert told.words == [(key, "put_failed", "set_device: device is lost") for key in ("one", "two")]


def test_the_publisher_of_the_second_tier_goes_on_after_a_word_that_could_not_be_said(arena: Arena) -> None:
    told, remote = Told("bad", "published"), Remote()
    writer = Speechless(TwoTiers(arena, remote), told)
    for key in ("bad", "good"):
        writer.put(key, feature())
    wait_for(lambda: set(remote.features) == {"bad", "good"} and not writer._pending())
    writer.close()
    assert [word for word in told.words if word[0] == "good"] == [("good", "put", ""), ("good", "published", "")]
