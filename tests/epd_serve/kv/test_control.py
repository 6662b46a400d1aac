"""Both ends of the control channel over real sockets, with messages that get lost, late, doubled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epd_serve.kv import control
from epd_serve.kv.control import DecodeControl, PrefillControl
from epd_serve.kv.decode_desk import DecodeDesk
from epd_serve.kv.faults import Faults, here_of
from epd_serve.kv.prefill_desk import Admission, PrefillDesk, PromptShape
from tests.epd_serve.engine.kv.fakes import BLOCK_SIZE, key_of, ready
from tests.waiting import PATIENCE_S, wait_for

A = key_of("a")
SILENCE_S = 60.0  # no test waits for it


class Pair:
    """P's and D's schedulers, as far as transfers go."""

    def __init__(self, folder: Path, faults: str = "") -> None:
        self.endpoint = f"ipc://{folder}/P0.kv"
        self.faults = faults
        self.p = self.start_p("p1")
        self.d = DecodeControl(DecodeDesk(SILENCE_S), Faults(faults))

    def start_p(self, life: str) -> PrefillControl:
        return PrefillControl(PrefillDesk(life, 60.0), self.endpoint, Faults(self.faults))

    def reserve(self) -> None:
        with self.d.lock:
            self.d.desk.reserved(self.endpoint, ready(A), time.monotonic())
        self.d.flush()

    def leave_d(self) -> None:
        with self.d.lock:
            self.d.desk.gone(A, time.monotonic())
        self.d.flush()

    def leave_p(self) -> None:
        with self.p.lock:
            assert not self.p.desk.gone(A, "client left")
        self.p.flush()

    def admission(self) -> Admission:
        with self.p.lock:
            return self.p.desk.admit(A, PromptShape(10, "h", BLOCK_SIZE, 2), time.monotonic())

    def offered(self) -> bool:
        with self.p.lock:
            return A in self.p.desk._entries

    def heard_at(self) -> float:
        with self.d.lock:
            return self.d.desk._leases.until[A]

    def failures(self) -> list[object]:
        with self.d.lock:
            return list(self.d.desk.take_failures())

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Pair]]:
    monkeypatch.setattr(control, "_BEAT_S", 0.05)
    made: list[Pair] = []

    def make(faults: str = "") -> Pair:
        made.append(Pair(tmp_path, faults))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_an_offer_is_made_and_heartbeats_answer_it(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.reserve()
    first = one.heard_at()
    wait_for(lambda: one.heard_at() > first)
    assert one.admission() is Admission.SEND


@pytest.mark.parametrize(
    "faults",
    [
        "seed=1;drop=Ready:0.5;drop=Cancel:0.5;drop=CancelAck:0.5;drop=Alive:0.5",
        "delay=Ready:0.3s",
        "double=Ready:1;double=Cancel:1;double=CancelAck:1;double=Alive:1",
    ],
    ids=["dropped", "delayed", "doubled"],
)
def test_a_cancel_gives_the_blocks_back_whatever_becomes_of_messages(pair: Callable[..., Pair], faults: str) -> None:
    one = pair(faults)
    one.reserve()
    one.leave_d()  # a delayed READY arrives after this CANCEL, and must not revive the transfer
    assert wait_for(one.failures) == [A]
    assert one.admission() is Admission.ALONE
    assert one.failures() == []


def test_a_refusal_that_was_lost_is_asked_for(pair: Callable[..., Pair]) -> None:
    one = pair("seed=2;drop=Refused:0.7")
    one.reserve()
    wait_for(one.offered)
    one.leave_p()
    assert wait_for(one.failures) == [A]


def test_a_decode_that_connects_again_is_answered_under_its_name(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.reserve()
    wait_for(one.offered)
    one.p.close()
    one.p = one.start_p("p2")
    assert wait_for(one.failures) == [A]  # the offer is made again, and this life refuses it


def test_an_offer_is_held_up_before_it_leaves(pair: Callable[..., Pair], tmp_path: Path) -> None:
    armed = tmp_path / "pause"
    armed.write_text("1")
    one = pair(f"pause=ready:{armed}")
    one.reserve()
    wait_for(here_of(armed).exists)
    assert one.admission() is Admission.WAIT
    here_of(armed).unlink()
    wait_for(lambda: one.admission() is Admission.SEND)


def test_a_mistake_of_ours_ends_no_thread(pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture) -> None:
    one = pair()
    broken = threading.Event()
    beat = one.d.desk.beat

    def fail_once(now: float) -> None:
        one.d.desk.beat = beat  # type: ignore[method-assign]
        broken.set()
        raise RuntimeError("a mistake")

    one.d.desk.beat = fail_once  # type: ignore[method-assign]
    assert broken.wait(PATIENCE_S)
    one.reserve()
    wait_for(one.offered)
    assert "a mistake" in caplog.text
