"""What D's worker makes of packets, and when it says that a transfer has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epd_serve import wire
from epd_serve.wire import TransferKey
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import HostMemory
from tests.epd_serve.engine.kv.receiver.ends import (
    BLOCKS,
    LAYERS,
    STAGING,
    A,
    B,
    Link,
    Start,
)
from tests.epd_serve.engine.kv.slow_devices import SlowDevice
from tests.fake_npu.device import FakeDevice
from tests.waiting import PATIENCE_S, wait_for


@pytest.mark.parametrize("device", [HostMemory, lambda: FakeDevice(latency_s=0.002)], ids=["cpu", "fake"])
def test_parts_of_several_transfers_land_in_their_blocks_before_the_credit(
    start: Start, link: Link, device: Callable[[], DeviceMemory]
) -> None:
    d = start(device=device())
    p = link(d)
    d.expect(A, B)
    p.packet([(A, [(1, 2), (6, 1)]), (B, [(4, 1)])], (0, 2))
    assert torch.equal(d.blocks(6)[:4], p.blocks(6)[:4])  # the credit has come, so all has arrived
    p.packet([(A, [(1, 2), (6, 1)]), (B, [(4, 1)])], (2, 3))
    for block in range(BLOCKS):
        wanted = p.blocks(block) if block in (1, 2, 4, 6) else torch.zeros_like(p.blocks(block))
        assert torch.equal(d.blocks(block), wanted)
    p.say(wire.Done(A, True, packets=2))
    p.say(wire.Done(B, True, packets=2))
    assert d.wait_ended(A, B) == {A: True, B: True}


def test_a_packet_that_comes_twice_is_obeyed_once_and_credited_twice(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    d.expect(A)
    packet = p.stage([(A, [(1, 1)])])
    p.say(packet)
    assert p.hear() == wire.Credit(packet.seq)
    p.staging.fill_(9)  # the credit gave it back
    p.say(packet)
    assert p.hear() == wire.Credit(packet.seq)
    assert torch.equal(d.blocks(1), p.blocks(1))
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: True}


def test_a_packet_that_was_overtaken_is_not_written_and_fails_its_transfer(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    d.expect(A)
    late = p.stage([(A, [(1, 1)])])
    p.packet([(A, [(2, 1)])])
    p.say(late)
    assert p.hear() == wire.Credit(late.seq)
    p.say(wire.Done(A, True, packets=2))
    assert d.wait_ended(A) == {A: False}
    assert not d.blocks(1).any()


@pytest.mark.parametrize("packets", [0, 1, 3])
def test_a_transfer_with_another_number_of_packets_than_were_sent_fails(start: Start, link: Link, packets: int) -> None:
    d = start()
    p = link(d)
    d.expect(A, B)
    p.packet([(A, [(1, 1)]), (B, [(2, 1)])], (0, 2))
    p.packet([(A, [(1, 1)]), (B, [(2, 1)])], (2, 3))
    p.say(wire.Done(A, True, packets=packets))
    p.say(wire.Done(B, True, packets=2))
    assert d.wait_ended(A, B) == {A: False, B: True}


def test_only_the_part_of_a_transfer_that_is_over_is_dropped(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    d.expect(A, B)
    p.say(wire.Done(A, False, "cancelled"))
    assert d.wait_ended(A) == {A: False}
    p.packet([(A, [(1, 1)]), (B, [(2, 1)]), (A, [(3, 1)])])
    assert not d.blocks(1).any() and not d.blocks(3).any()
    assert torch.equal(d.blocks(2), p.blocks(2))
    p.say(wire.Done(B, True, packets=1))
    assert d.wait_ended(B)[B]


def bad_packets() -> list[wire.Packet]:
    good = wire.Packet(1, 0, (0, 1), [(A, [(1, 1)])])
    fields = {name: getattr(good, name) for name in ("seq", "offset", "layers", "parts")}
    changes: list[dict[str, Any]] = [
        {"offset": -1},
        {"offset": STAGING - 1},
        {"layers": (0, LAYERS + 1)},
        {"layers": (2, 2)},
        {"layers": (-1, 1)},
        {"parts": [(A, [(BLOCKS, 1)])]},
        {"parts": [(A, [(BLOCKS - 1, 2)])]},
        {"parts": [(A, [(-1, 1)])]},
        {"parts": [(A, [(1, 0)])]},
        {"parts": [(A, [(1, -1), (1, 2)])]},
        {"parts": [(A, [(0, 8)] * 1000)]},
    ]
    return [wire.Packet(**{**fields, **change}) for change in changes]


@pytest.mark.parametrize("packet", bad_packets())
def test_a_packet_outside_of_what_is_ours_fails_its_transfer_and_no_other(
    start: Start, link: Link, packet: wire.Packet
) -> None:
    d = start()
    p = link(d)
    d.expect(A, B)
    p.staging.fill_(9)
    p.say(packet)
    assert p.hear() == wire.Credit(1)
    assert d.wait_ended(A) == {A: False}
    assert not any(d.blocks(block).any() for block in range(BLOCKS))
    p.seq = next(p._numbers)
    p.packet([(B, [(2, 1)])])
    p.say(wire.Done(B, True, packets=1))
    assert d.wait_ended(B) == {A: False, B: True}


def test_a_device_that_refuses_to_write_fails_the_transfer_and_not_the_listener(
    start: Start, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    device = HostMemory()
    d = start(device=device)
    p = link(d)
    d.expect(A, B)

    def lost(rows: object, runs: object, source: object) -> None:
        raise RuntimeError("device lost")

    device.scatter = lost  # type: ignore[method-assign]
    p.packet([(A, [(1, 1)])])
    assert d.wait_ended(A) == {A: False}
    assert "RuntimeError: device lost" in caplog.text
    del device.scatter  # type: ignore[method-assign]
    p.packet([(B, [(2, 1)])])
    p.say(wire.Done(B, True, packets=1))
    assert d.wait_ended(B)[B]


def test_a_failure_is_not_reported_while_a_packet_of_it_is_on_its_way_into_the_device(start: Start, link: Link) -> None:
    device = SlowDevice("host0/npu0")
    device.copies_late = True
    d = start(device=device)
    p = link(d)
    d.expect(A)
    device.turnstile.close()
    p.say(p.stage([(A, [(1, 1)])]))
    wait_for(lambda: device.stuck)
    d.receiver.expect([], [A])
    seen: list[tuple[dict[TransferKey, bool], torch.Tensor]] = []
    reporter = threading.Thread(target=lambda: seen.append((d.poll(), d.blocks(1).clone())))
    reporter.start()
    reporter.join(0.05)
    assert not seen  # the blocks may not be given back yet
    device.turnstile.open()
    reporter.join(PATIENCE_S)
    ((ended, before),) = seen
    assert ended == {A: False}
    assert p.hear() == wire.Credit(1)
    assert torch.equal(d.blocks(1), before) and torch.equal(before, p.blocks(1))  # whole, and nothing came later


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_of_half_the_heads_writes_its_half_of_every_block(start: Start, link: Link, rank: int) -> None:
    d = start()
    p = link(d, tp=2, rank=rank)
    d.expect(A)
    p.packet([(A, [(3, 2)])])
    got = torch.stack([torch.stack([part[3:5] for part in kv]) for kv in d.caches.values()])
    assert torch.equal(got[..., rank : rank + 1, :], p.kv[:, :, 3:5])
    assert not got[..., 1 - rank, :].any()
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A)[A]


def test_a_transfer_of_two_workers_ends_when_both_have_said_so(start: Start, link: Link) -> None:
    d = start()
    one, two = (link(d, tp=2, rank=rank) for rank in range(2))
    d.expect(A)
    one.packet([(A, [(1, 1)])])
    for _ in range(3):  # duplicates count once
        one.say(wire.Done(A, True, packets=1, senders=2))
    one.packet([(B, [(5, 1)])])  # the Dones before it have been read
    assert not d.poll()
    two.packet([(A, [(1, 1)])])
    two.say(wire.Done(A, True, packets=1, senders=2))
    assert d.wait_ended(A) == {A: True}
    got = d.blocks(1)
    assert torch.equal(got[:, :, :1], one.blocks(1)) and torch.equal(got[:, :, 1:], two.blocks(1))


def test_a_transfer_of_which_one_worker_failed_fails_when_the_other_has_stopped(start: Start, link: Link) -> None:
    d = start()
    one, two = (link(d, tp=2, rank=rank) for rank in range(2))
    d.expect(A)
    one.say(wire.Done(A, False, "device lost", senders=2))
    one.packet([(B, [(5, 1)])])
    assert not d.poll()
    two.packet([(A, [(1, 1)])])
    two.say(wire.Done(A, True, packets=1, senders=2))
    assert d.wait_ended(A) == {A: False}


def test_the_same_worker_over_two_connections_is_one_sender(start: Start, link: Link) -> None:
    d = start()
    first = link(d, tp=2)
    d.expect(A)
    first.say(wire.Done(A, True, senders=2))
    first.packet([(B, [(5, 1)])])
    again = link(d, tp=2)
    again.say(wire.Done(A, True, senders=2))
    again.packet([(B, [(5, 1)])])
    assert not d.poll()


def test_done_over_a_connection_that_never_said_hello_fails_its_transfer(start: Start, link: Link) -> None:
    d = start()
    stranger = link(d, opened=False)
    d.expect(A)
    stranger.say(wire.Done(A, True))
    assert d.wait_ended(A) == {A: False}


def test_a_lost_packet_where_others_may_write_without_help_waits_for_their_done(start: Start, link: Link) -> None:
    d = start(one_sided=True)
    p = link(d)
    d.expect(A)
    p.say(wire.Packet(1, -1, (0, 1), [(A, [(1, 1)])]))
    assert p.hear() == wire.Credit(1)
    assert not d.poll()
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: False}


def test_done_is_stamped_when_it_ended_the_transfer(start: Start, link: Link, tmp_path: Path) -> None:
    d = start(trace=str(tmp_path / "trace"))
    one, two = (link(d, tp=2, rank=rank) for rank in range(2))
    d.expect(A)
    one.say(wire.Done(A, True, senders=2))
    two.say(wire.Done(A, True, senders=2))
    d.wait_ended(A)
    stamps = [line for file in tmp_path.glob("trace*") for line in file.read_text().splitlines() if "kv_done" in line]
    assert len(stamps) == 1 and "t-a" in stamps[0]


def test_a_packet_of_a_transfer_that_nobody_expects_is_dropped_and_counted(
    start: Start, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    d = start()
    p = link(d)
    d.expect(A)
    p.packet([(A, [(1, 1)]), (B, [(5, 1)])])
    p.packet([(B, [(6, 1)])])
    assert torch.equal(d.blocks(1), p.blocks(1))
    assert not d.blocks(5).any() and not d.blocks(6).any()
    assert "dropped KV of t-b, which nobody expects (2 so far)" in caplog.text
    p.say(wire.Done(B, True, packets=2))
    p.say(wire.Done(A, True, packets=1))
    assert d.wait_ended(A) == {A: True}
    d.expect(B)  # too late for what was dropped
    p.packet([(B, [(5, 1)])])
    p.say(wire.Done(B, True, packets=3))
    assert d.wait_ended(B) == {A: True, B: False}


def test_packets_are_taken_from_the_answer_to_expect_on(start: Start, link: Link) -> None:
    d = start()
    p, scheduler = link(d), link(d, opened=False)
    scheduler.say(wire.Expect(A))
    assert wire.to_decode_control.decode(scheduler.receive()) == wire.Expecting(A)
    p.packet([(A, [(1, 1)])])
    p.say(wire.Done(A, True, packets=1))
    p.packet([(B, [(5, 1)])])  # DONE has been read
    assert not d.poll(), "vLLM has not told of the request"
    d.expect(A)
    assert d.wait_ended(A) == {A: True}
    assert torch.equal(d.blocks(1), p.blocks(1))


def test_a_late_packet_of_a_transfer_that_was_reported_is_dropped(start: Start, link: Link) -> None:
    d = start()
    p = link(d)
    d.expect(A)
    d.receiver.expect([], [A])  # the scheduler gave it up
    assert d.wait_ended(A) == {A: False}
    p.packet([(A, [(1, 1)])])
    assert not d.blocks(1).any()
