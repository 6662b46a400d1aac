"""What D's worker answers to those who greet it, come back or probe, and the faults that its answers may meet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epd_serve import wire
from epd_serve.kv.faults import here_of
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import HostMemory
from tests.epd_serve.engine.kv.receiver.ends import (
    BLOCK_SIZE,
    BLOCKS,
    LAYERS,
    STAGING,
    A,
    Link,
    NoEngine,
    Start,
)
from tests.fake_npu.device import FakeDevice
from tests.waiting import wait_for


def test_a_hello_is_answered_with_who_answers_and_the_shape(start: Start, link: Link) -> None:
    d = start()
    ack = link(d, opened=False).hello()
    assert isinstance(ack, wire.HelloAck)
    assert (ack.target, ack.session, ack.bases, ack.scratch) == ("D0:1", "", [], (0, 0))
    assert ack.shape["tp"] == 1 and ack.shape["head_rows"] == [[BLOCK_SIZE] * 2] * LAYERS


def test_prefill_chooses_among_the_transports_of_decode(start: Start, link: Link) -> None:
    d = start(one_sided=True)
    p = link(d, opened=False)
    ack = p.hello("mooncake")
    assert isinstance(ack, wire.HelloAck)
    assert (ack.session, ack.bases, ack.scratch) == (NoEngine.session, NoEngine.bases, NoEngine.scratch)
    p.say(wire.Probe(1, 0, 100))
    assert p.hear() == wire.HelloRefused("a staged probe on a Mooncake link")
    assert isinstance(p.hello("shm"), wire.HelloAck)  # on the same connection
    d.expect(A)
    p.packet([(A, [(1, 1)])])
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: True}


def test_several_links_of_different_transports_work_side_by_side(start: Start, link: Link) -> None:
    d = start(one_sided=True)
    one, two = link(d, tp=2, rank=0), link(d, tp=2, rank=1, opened=False)
    assert isinstance(two.hello("mooncake"), wire.HelloAck)
    d.expect(A)
    one.packet([(A, [(1, 1)])])
    one.say(wire.Done(A, True, packets=1, senders=2))
    two.say(wire.Done(A, True, packets=0, senders=2))
    assert d.wait_ended(A) == {A: True}


def test_a_hello_that_comes_twice_changes_nothing(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    d.expect(A)
    p.packet([(A, [(1, 1)])])
    assert isinstance(p.hello(), wire.HelloAck)
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: True}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, f"version: {wire.VERSION} here, 2 there"),
        ({"transport": "mooncake"}, "transport: shm here, mooncake there"),
        ({"staging": "/nowhere"}, "staging memory /nowhere cannot be opened"),
        ({"staging_bytes": STAGING * 2}, "cannot be mapped"),
        ({"staging_bytes": -1}, "cannot be mapped"),
    ],
)
def test_a_hello_that_cannot_be_accepted_says_why(start: Start, link: Link, changes: dict[str, Any], said: str) -> None:
    answer = link(start(), opened=False).hello(**changes)
    assert isinstance(answer, wire.HelloRefused) and said in answer.reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "bf16"}, "dtype: 'uint8' here, 'bf16' there"),
        ({"tp": 2}, "tp: 1 here, 2 there"),
        ({"rank": 1}, "rank: 0 here, 1 there"),
        ({"tp": "2"}, "tp: 1 here, '2' there"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_by_name(
    start: Start, link: Link, changes: dict[str, Any], said: str
) -> None:
    p = link(start(), opened=False)
    answer = p.hello(shape={**p.shape, **changes})
    assert isinstance(answer, wire.HelloRefused) and said in answer.reason


@pytest.mark.parametrize("life", ["P0:1", "P0:2"])
def test_a_reconnected_sender_replaces_its_former_connection(start: Start, link: Link, life: str) -> None:
    d = start()
    former = link(d)
    later = link(d, opened=False, life=life)
    assert isinstance(later.hello(staging=str(former.path)), wire.HelloAck)
    d.expect(A)
    former.say(former.stage([(A, [(1, 1)])]))
    assert d.wait_ended(A) == {A: False}
    assert len(d.side._senders) == len(d.receiver._peers) == 1


def test_staging_memory_of_a_gone_sender_stays_readable_until_it_comes_back(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    os.unlink(p.path)  # as P does when it stops
    d.expect(A)
    p.packet([(A, [(1, 1)])])
    assert torch.equal(d.blocks(1), p.blocks(1))


@pytest.mark.parametrize("device", [HostMemory, lambda: FakeDevice(latency_s=0.002)], ids=["cpu", "fake"])
@pytest.mark.parametrize("nbytes", [1, 4096, STAGING])
def test_a_probe_is_copied_to_memory_of_no_meaning_and_credited(
    start: Start, link: Link, device: Callable[[], DeviceMemory], nbytes: int
) -> None:
    d = start(device=device())
    p = link(d)
    p.staging.fill_(5)
    p.say(wire.Probe(7, STAGING - nbytes, nbytes))
    assert p.hear() == wire.Credit(7)
    with d.side._memory.borrow(nbytes) as memory:
        assert memory.eq(5).all()
    assert not any(d.blocks(block).any() for block in range(BLOCKS))


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 10), (0, 0), (0, -5), (1, STAGING)])
def test_a_probe_outside_of_the_staging_memory_is_refused(start: Start, link: Link, offset: int, nbytes: int) -> None:
    p = link(start())
    p.say(wire.Probe(1, offset, nbytes))
    answer = p.hear()
    assert isinstance(answer, wire.HelloRefused) and "outside of the staging memory" in answer.reason


def test_a_stranger_is_not_probed(start: Start, link: Link) -> None:
    p = link(start(), opened=False)
    p.say(wire.Probe(1, 0, 10))
    assert p.hear() == wire.HelloRefused("a packet from a peer that has not said hello")


def test_answers_meet_the_faults_that_are_asked_for(start: Start, link: Link) -> None:
    d = start(faults="drop=HelloRefused:1;double=Credit:1;delay=HelloAck:0.05s")
    p = link(d, opened=False)
    began = time.monotonic()
    assert isinstance(p.hello(), wire.HelloAck)
    assert time.monotonic() - began >= 0.05
    p.say(wire.Probe(3, 0, 10))
    assert (p.hear(), p.hear()) == (wire.Credit(3), wire.Credit(3))
    p.say(wire.Probe(4, -1, 10))
    assert p.silent()


def test_an_answer_is_delayed_without_holding_up_the_others(start: Start, link: Link) -> None:
    d = start(faults="delay=Credit:3600s")
    p = link(d)
    d.expect(A)
    p.say(p.stage([(A, [(1, 1)])]))
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: True}
    assert p.silent()


def test_done_can_be_met_before_it_is_reported(start: Start, link: Link, tmp_path: Path) -> None:
    armed = tmp_path / "received"
    armed.write_text("1")
    d = start(faults=f"pause=received:{armed}")
    p = link(d)
    d.expect(A)
    p.say(wire.Done(A, True))
    wait_for(here_of(armed).exists)
    assert not d.poll()
    here_of(armed).unlink()
    assert d.wait_ended(A) == {A: True}
