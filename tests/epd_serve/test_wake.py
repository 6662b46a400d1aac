"""What sleepers sleep on: no ring is lost, whoever rings and whenever."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from epd_serve.wake import Bell, IdleWaiter, end_waits_late
from tests.waiting import PATIENCE_S, wait_for

LONG_S = 10 * PATIENCE_S
RING = "import sys; from pathlib import Path; from epd_serve.wake import Bell; Bell(Path(sys.argv[1])).ring()"


def rings_within_patience(bell: Bell) -> bool:
    began = time.monotonic()
    return bell.wait(LONG_S) and time.monotonic() < began + PATIENCE_S


def test_a_ring_before_the_sleep_is_heard() -> None:
    bell = Bell()
    bell.ring()
    assert rings_within_patience(bell)


def test_a_ring_during_the_sleep_ends_it() -> None:
    bell, heard = Bell(), []
    sleeper = threading.Thread(target=lambda: heard.append(rings_within_patience(bell)), daemon=True)
    sleeper.start()
    wait_for(lambda: _sleeps(sleeper))
    bell.ring()
    sleeper.join(PATIENCE_S)
    assert heard == [True]


def test_what_was_heard_keeps_nobody_from_sleeping() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    assert [bell.wait(0.001), bell.wait(0.001)] == [True, False]


def test_a_sleep_without_a_ring_ends_in_time() -> None:
    began = time.monotonic()
    assert not Bell().wait(0.01)
    assert 0.01 <= time.monotonic() - began < PATIENCE_S


def test_each_of_several_sleepers_on_one_path_hears_the_ring(tmp_path: Path) -> None:
    sleepers = [Bell(tmp_path / "bell") for _ in range(3)]
    Bell(tmp_path / "bell").ring()
    assert all(map(rings_within_patience, sleepers)), "the first one has taken the others' ring"


def test_another_process_rings(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "bell")
    subprocess.run([sys.executable, "-c", RING, str(tmp_path / "bell")], check=True, timeout=PATIENCE_S)
    assert rings_within_patience(bell)


def test_no_ring_of_many_at_once_is_lost(tmp_path: Path) -> None:
    """Each ringer rings when the sleeper has answered it, so one lost ring would stop it for good."""
    path, rounds, asked, answered = tmp_path / "bell", 300, [0, 0, 0], [0, 0, 0]

    def ringer(at: int, bell: Bell) -> None:
        for turn in range(1, rounds + 1):
            asked[at] = turn
            bell.ring()
            wait_for(lambda turn=turn: answered[at] == turn)  # type: ignore[misc]

    threads = [threading.Thread(target=ringer, args=(at, Bell(path)), daemon=True) for at in range(3)]
    bell = Bell(path)
    for thread in threads:
        thread.start()
    while answered != [rounds] * 3:
        assert answered != asked or bell.wait(PATIENCE_S), f"a ring is lost: {asked}, {answered}"
        answered[:] = asked
    for thread in threads:
        thread.join(PATIENCE_S)


def test_a_bell_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Bell(tmp_path / "missing" / "bell")


def test_one_wake_is_there_for_all_who_expect_one_in_a_step() -> None:
    waiter = IdleWaiter()
    waiter.expect_wake()  # for features
    waiter.expect_wake()  # for KV
    assert waiter.wake_is_expected()
    assert not waiter.wake_is_expected(), "said of one step"


@pytest.mark.parametrize("first", ["expect_wake", "need_step"])
def test_nobody_sleeps_while_something_moves_with_steps_alone(first: str) -> None:
    waiter = IdleWaiter()
    for said in (first, "expect_wake", "need_step"):
        getattr(waiter, said)()
    assert not waiter.wake_is_expected()
    waiter.expect_wake()
    assert waiter.wake_is_expected(), "said of one step"


def test_processes_that_share_a_path_wake_each_other(tmp_path: Path) -> None:
    engine, worker = IdleWaiter(), IdleWaiter()
    for one in (engine, worker, engine):  # a plugin may be loaded twice
        one.share(tmp_path / "idle")
    worker.wake()
    began = time.monotonic()
    engine.wait(LONG_S)
    assert time.monotonic() < began + PATIENCE_S


def _sleeps(thread: threading.Thread) -> bool:
    if thread.native_id is None:
        return False
    return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_a_thread_whose_waits_may_end_late_hears_a_ring_at_once() -> None:
    bell, heard = Bell(), []
    end_waits_late(int(LONG_S * 1e9))
    try:
        sleeper = threading.Thread(target=lambda: heard.append(rings_within_patience(bell)), daemon=True)
        sleeper.start()
    finally:
        end_waits_late(0)
    wait_for(lambda: _sleeps(sleeper))
    bell.ring()
    sleeper.join(PATIENCE_S)
    assert heard == [True]
