"""KV from P to D over real sockets and shared memory, without vLLM: what arrives, and how transfers end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from epd_serve import wire
from epd_serve.kv.plan import Run
from tests.epd_serve.engine.kv.fakes import DecodeEnd, Ends, Gate, PrefillEnd, chunk, key_of, packet, same
from tests.waiting import PATIENCE_S, wait_for


@pytest.mark.parametrize("group", [1, 2, 3, 5, 9])
def test_every_block_of_every_layer_arrives_and_nothing_else_changes(start: Ends, group: int) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd, grouping=group)
    d.expect(key_of("a"), range(20, 28))
    p.step([chunk(d, "a", [3, 2, 1], [20, 21, 22], last=False)])
    p.step([chunk(d, "a", [9, 10, 11, 4, 5], [23, 24, 25, 27, 26], last=True)], finished=["a"])
    d.wait_ended(1)
    assert [item.request for item in d.received] == ["at-d-a"]
    same(p, d, {3: 20, 2: 21, 1: 22, 9: 23, 10: 24, 11: 25, 4: 27, 5: 26})
    p.wait_over({"a"})


@pytest.mark.parametrize("staging_bytes", [4096, 3 * 4096, 10000])
def test_packets_larger_than_the_staging_memory_are_cut(start: Ends, staging_bytes: int) -> None:
    options = {"layers": 3, "blocks": 200}
    d = start(DecodeEnd, **options)
    p = start(PrefillEnd, grouping=3, staging_bytes=staging_bytes, **options)
    d.expect(key_of("a"), range(200))
    p.step([chunk(d, "a", range(200), reversed(range(200)), last=True)], finished=["a"])
    d.wait_ended(1)
    assert d.received
    same(p, d, {src: 199 - src for src in range(200)})


def test_several_transfers_share_a_link_and_each_ends_once(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd, staging_bytes=2 * 4096)
    for i in range(8):
        d.expect(key_of(f"r{i}"), range(4 * i, 4 * i + 4))
    p.step([chunk(d, f"r{i}", [4 * i, 4 * i + 1], [4 * i, 4 * i + 1], last=False) for i in range(8)])
    names = [f"r{i}" for i in range(8)]
    p.step(
        [chunk(d, f"r{i}", [4 * i + 2, 4 * i + 3], [4 * i + 2, 4 * i + 3], last=True) for i in range(8)], finished=names
    )
    d.wait_ended(8)
    assert sorted(item.request for item in d.received) == [f"at-d-{name}" for name in names]
    same(p, d, {i: i for i in range(32)})
    p.wait_over(set(names))
    assert not p.sender.take_over(names)  # reported once
    assert not d.poll()


def test_layers_that_no_hook_announced_are_swept_at_the_end_of_the_step(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)], hooks=0)
    d.wait_ended(1)
    same(p, d, {1: 5})


def test_a_transfer_is_not_over_before_its_last_chunk(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), [5, 6])
    p.step([chunk(d, "a", [1], [5], last=False)])
    wait_for(lambda: bool(d.caches["layer.4"][5].any()))
    assert not d.poll()
    assert not p.sender.take_over(["a"])
    p.step([chunk(d, "a", [2], [6], last=True)])
    d.wait_ended(1)
    p.wait_over({"a"})


def test_done_that_comes_before_the_step_is_kept(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.announce(key_of("a"))
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    p.wait_over({"a"})
    assert not d.poll()
    d.expect(key_of("a"), [5])
    d.wait_ended(1)
    assert d.received


def test_a_stopped_transfer_ends_as_failed_and_nothing_follows(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), [5, 6])
    p.step([chunk(d, "a", [1], [5], last=False)])
    p.step(stops=["a"])
    p.step([chunk(d, "a", [2], [6], last=True)], stops=["a"], finished=["a"])
    d.wait_ended(1)
    assert [item.blocks for item in d.failed] == [(5, 6)]
    p.wait_over({"a"})
    assert not d.caches["layer.0"][6].any()


def test_a_preempted_transfer_is_sent_again_from_other_blocks(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), [5, 6])
    p.step([chunk(d, "a", [1], [5], last=False)])
    p.step(preempted=["a"])
    p.step([chunk(d, "a", [8, 9], [5, 6], last=True)], finished=["a"])
    d.wait_ended(1)
    assert d.received
    same(p, d, {8: 5, 9: 6})


def test_a_transfer_preempted_after_its_last_chunk_is_not_called_whole(start: Ends) -> None:
    """Under async scheduling the next step may preempt before the last chunk's packets have left."""
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), [5])
    gate = Gate()
    p.wait_up(d).put(packet(d, "b", (0, 1), [Run(0, 0, 1)], gate.wait), 0.0)  # keeps the link busy
    p.step([chunk(d, "a", [1], [5], last=True)])
    p.step(preempted=["a"])
    gate.opened.set()
    d.wait_ended(1)
    assert d.failed
    assert not d.received


def test_packets_after_a_transfer_was_given_up_never_land(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), [5, 6])
    p.step([chunk(d, "a", [1], [5], last=False)])
    wait_for(lambda: bool(d.caches["layer.4"][5].any()))
    d.fail(key_of("a"))
    d.wait_ended(1)
    p.step([chunk(d, "a", [2], [6], last=True)], finished=["a"])
    p.wait_over({"a"})
    d.expect(key_of("b"), [7])
    p.step([chunk(d, "b", [3], [7], last=True)])
    d.wait_ended(2)  # b came after a's late packet on the same link
    assert not d.caches["layer.0"][6].any()
    assert [item.request for item in d.received] == ["at-d-b"]
    assert [item.request for item in d.failed] == ["at-d-a"]


def test_a_failure_is_not_reported_while_a_packet_of_it_is_being_written(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    inside, go = threading.Event(), threading.Event()
    copy = d.side.packet

    def slow(peer: bytes, packet: wire.Packet, dropped: Any) -> None:
        inside.set()
        assert go.wait(PATIENCE_S)
        copy(peer, packet, dropped)

    d.side.packet = slow
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=False)])
    assert inside.wait(PATIENCE_S)
    d.fail(key_of("a"))
    reported = threading.Event()
    reporter = threading.Thread(target=lambda: (d.poll(), reported.set()))
    reporter.start()
    assert not reported.wait(0.05)  # the blocks may not be given back yet
    go.set()
    reporter.join(PATIENCE_S)
    assert d.failed


def test_late_chunks_leave_in_a_step_without_tokens_and_release_a_finished_request(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), range(20, 23))
    p.step(finished=["a"])  # vLLM finishes it before the worker has heard of its transfer
    p.sender.begin_step((), (), (), 0)
    p.sender.send_late([chunk(d, "a", [3, 2, 1], [20, 21, 22], last=True)], ["a"])
    d.wait_ended(1)
    same(p, d, {3: 20, 2: 21, 1: 22})
    p.wait_over({"a"})


def test_a_late_chunk_of_a_prompt_that_goes_on_is_followed_by_the_rest(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), [5, 6])
    p.sender.begin_step((), (), (), 0)
    p.sender.send_late([chunk(d, "a", [1], [5], last=False)], ())
    p.step([chunk(d, "a", [2], [6], last=True)], finished=["a"])
    d.wait_ended(1)
    same(p, d, {1: 5, 2: 6})
    p.wait_over({"a"})


def test_a_finished_request_of_which_nothing_will_be_sent_is_over(start: Ends) -> None:
    p = start(PrefillEnd)
    p.sender.begin_step((), (), (), 0)
    p.sender.send_late((), ["a"])
    assert p.sender.take_over(()) == {"a"}


@pytest.mark.parametrize(("group", "packets"), [(1, 5), (5, 1)])
def test_late_chunks_are_cut_as_all_others(start: Ends, group: int, packets: int) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd, grouping=group)
    d.expect(key_of("a"), [5])
    p.sender.begin_step((), (), (), 0)
    p.sender.send_late([chunk(d, "a", [1], [5], last=True)], ["a"])
    d.wait_ended(1)
    same(p, d, {1: 5})
    p.wait_over({"a"})
    link = p.links[d.endpoint]
    wait_for(lambda: link.snapshot().transfers == 1 and link.snapshot().packets, "the link's account of it")
    wait_for(lambda: link.snapshot().packets >= packets, "its last packet")
    assert link.snapshot().packets == packets
