"""Faults on purpose: what is dropped, doubled, delayed, and where somebody is held up."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from epd_serve import wire
from epd_serve.errors import ConfigError
from epd_serve.kv.faults import Faults, faults_of, here_of
from tests.epd_serve.engine.kv.fakes import key_of
from tests.waiting import PATIENCE_S, wait_for

CANCEL = wire.Cancel(key_of("a"))
ALIVE = wire.Alive([key_of("a")])


def test_without_faults_every_message_leaves_once_and_nobody_is_held_up() -> None:
    faults = Faults()
    assert faults.deliveries(CANCEL) == (0.0,)
    faults.reached("packet")


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        ("drop=Cancel:1", ()),
        ("double=Cancel:1", (0.0, 0.0)),
        ("delay=Cancel:0.2s", (0.2,)),
        ("delay=Cancel:0.2s;double=Cancel:1", (0.2, 0.2)),
        ("drop=Alive:1", (0.0,)),
    ],
)
def test_a_fault_meets_the_messages_it_names(text: str, leaves: tuple[float, ...]) -> None:
    assert Faults(text).deliveries(CANCEL) == leaves


def test_draws_repeat_with_the_seed() -> None:
    def draws(seed: int) -> list[bool]:
        faults = Faults(f"seed={seed};drop=Alive:0.5")
        return [bool(faults.deliveries(ALIVE)) for _ in range(50)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert {True, False} == set(draws(3))


def test_a_pause_waits_at_the_number_that_armed_it_and_can_be_armed_again(tmp_path: Path) -> None:
    armed = tmp_path / "x"
    faults = Faults(f"pause=packet:{armed}")
    faults.reached("packet")  # not armed
    for number in (1, 3):
        armed.write_text(str(number))
        for _ in range(number - 1):
            faults.reached("packet")
            faults.reached("done")  # another point
        held_up = threading.Thread(target=faults.reached, args=("packet",))
        held_up.start()
        wait_for(here_of(armed).exists)
        assert not armed.exists()
        assert held_up.is_alive()
        here_of(armed).unlink()
        held_up.join(PATIENCE_S)
        assert not held_up.is_alive()


@pytest.mark.parametrize(
    "text",
    [
        *("nonsense", "drop=Ready", "drop=Ready:often", "drop=Redy:1", "drop=Ready:2", "double=Ready:-1"),
        *("delay=Done:soon", "delay=Redy:1s", "delay=Done:-1s", "delay=Done:inf", "delay=Done:nan"),
        *("pause=lunch:/x", "pause=packet:", "seed=x"),
    ],
)
def test_a_clause_that_means_nothing_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is no fault") as caught:
        Faults(text)
    assert caught.value.param == "--kv-faults"


def test_scheduler_and_worker_of_one_process_share_their_faults() -> None:
    assert faults_of("seed=5") is faults_of("seed=5")
