"""Which packets the sender makes of a step, and in which order a link sends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epd_serve import wire
from epd_serve.engine.kv.transport import LinkError
from epd_serve.kv.grouping import AdaptiveGrouping, Cuts, LinkCost, Step
from epd_serve.kv.link_queue import MAX_YIELD_S
from epd_serve.kv.plan import Run
from tests.epd_serve.engine.kv.fakes import HOST, DecodeEnd, Ends, Gate, PrefillEnd, chunk, key_of, packet, same
from tests.waiting import PATIENCE_S, wait_for


@dataclass
class Told:
    """A grouping that cuts as it is told, by whether somebody waits for the step's end; and what it was asked."""

    ending: Cuts
    continuing: Cuts
    asked: list[tuple[Step, LinkCost]] = field(default_factory=list)
    name: str = "told"

    def cuts(self, step: Step, cost: LinkCost) -> Cuts:
        self.asked.append((step, cost))
        return self.continuing if step.slack_s > 0.1 else self.ending  # a step's tail is less, a step more


def watch(d: DecodeEnd) -> list[wire.Packet]:
    """The packets that D gets, in order."""
    packets: list[wire.Packet] = []
    copy = d.side.packet

    def note(peer: bytes, packet: wire.Packet, dropped: Any) -> None:
        packets.append(packet)
        copy(peer, packet, dropped)

    d.side.packet = note
    return packets


def layers_and_members(packets: list[wire.Packet]) -> list[tuple[tuple[int, int], str]]:
    return [(packet.layers, "".join(key.child for key, _ in packet.parts)) for packet in packets]


def members(packets: list[wire.Packet]) -> list[str]:
    return [found for _, found in layers_and_members(packets)]


def hold_move(p: PrefillEnd, d: DecodeEnd) -> Gate:
    """The link's transport stops inside its next move until the gate opens."""
    side, gate = p.wait_up(d)._connection.side, Gate()
    move = side.move

    def slow(*args: Any) -> int:
        gate.wait()
        return move(*args)

    side.move = slow  # type: ignore[assignment]
    return gate


LONG_S = 1000.0  # per layer: no pause of this machine makes a deadline that is later in the test the earlier one


def layers_take(p: PrefillEnd, seconds: float) -> None:
    """What the sender expects of every step."""
    p.sender._clock.layer_s = lambda tokens: seconds


def test_transfers_of_a_step_that_go_to_one_worker_share_its_packets(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=3)
    packets = watch(d)
    for name, blocks in (("a", [5, 6]), ("b", [7])):
        d.expect(key_of(name), blocks)
    p.step([chunk(d, "a", [1, 2], [5, 6], last=True), chunk(d, "b", [3], [7], last=True)])
    d.wait_ended(2)
    assert layers_and_members(packets) == [((0, 3), "ab"), ((3, 5), "ab")]
    assert len(d.received) == 2
    same(p, d, {1: 5, 2: 6, 3: 7})


def test_each_worker_of_decode_gets_its_own_packets(start: Ends) -> None:
    one, two = start(DecodeEnd, "D0"), start(DecodeEnd, "D1")
    p = start(PrefillEnd, grouping=5)
    first, second = watch(one), watch(two)
    p.step([chunk(one, "a", [1], [5], last=True), chunk(two, "b", [2], [6], last=True)], finished=["a", "b"])
    p.wait_over({"a", "b"})
    wait_for(lambda: first and second)
    assert layers_and_members(first) == [((0, 5), "a")]
    assert layers_and_members(second) == [((0, 5), "b")]


def test_prompts_that_end_and_prompts_that_go_on_are_cut_apart(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=Told(ending=(1, 4, 5), continuing=(5,)))
    p.wait_up(d)
    layers_take(p, 1.0)
    packets = watch(d)
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "b", [2], [6], last=False), chunk(d, "a", [1], [5], last=True)])
    d.wait_ended(1)
    wait_for(lambda: len(packets) == 4)
    assert set(layers_and_members(packets)) == {
        ((0, 1), "a"),
        ((1, 4), "a"),
        ((4, 5), "a"),
        ((0, 5), "b"),
    }


def test_the_grouping_is_told_what_the_link_and_the_device_have_shown(start: Ends) -> None:
    told = Told(ending=(5,), continuing=(5,))
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=told)
    p.wait_up(d)._cost.now = lambda: LinkCost(0.25, 1e-6)
    layers_take(p, 0.5)
    p.step([chunk(d, "a", [1, 2], [5, 6], last=True)])
    ((step, cost),) = told.asked
    assert (step.layers, step.layer_bytes, step.layer_s) == (5, 128, 0.5)
    assert (step.backlog_s, step.slack_s) == (0.0, 0.0)
    assert cost == LinkCost(0.25, 1e-6)


def test_what_is_queued_counts_as_backlog(start: Ends) -> None:
    told = Told(ending=(5,), continuing=(5,))
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=told)
    link, gate = p.wait_up(d), Gate()
    link.put(packet(d, "x", (0, 1), [Run(0, 0, 1)], gate.wait), 0.0)
    gate.wait_reached()
    link.put(packet(d, "y", (0, 5), [Run(0, 0, 20)]), 0.0)
    p.step([chunk(d, "a", [1], [5], last=True)])
    gate.opened.set()
    ((step, _),) = told.asked
    assert step.backlog_s > 0


def test_what_goes_on_counts_what_ends_in_the_same_step_as_ahead_of_it(start: Ends) -> None:
    told = Told(ending=(5,), continuing=(5,))
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=told)
    p.wait_up(d)._cost.now = lambda: LinkCost(0.25, 0.0)
    layers_take(p, 1.0)
    p.step([chunk(d, "on", [2], [6], last=False), chunk(d, "a", [1], [5], last=True)])
    (ending, _), (going_on, _) = told.asked
    assert (ending.backlog_s, ending.slack_s) == (0.0, 0.0)
    assert (going_on.backlog_s, going_on.slack_s) == (0.25, 4.75)


def test_the_adaptive_grouping_sends_small_packets_last(start: Ends) -> None:
    d, p = start(DecodeEnd, layers=16), start(PrefillEnd, layers=16, grouping=AdaptiveGrouping(floor_bytes=64))
    link = p.wait_up(d)
    link._cost.now = lambda: LinkCost(1e-3, 1e-5)
    layers_take(p, 2e-3)
    packets = watch(d)
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)])
    d.wait_ended(1)
    sizes = [last - first for packet in packets for first, last in [packet.layers]]
    assert sum(sizes) == 16
    assert sizes[0] > sizes[-1] == 1


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_prompt_that_ends_overtakes_one_that_goes_on(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=5)
    link, gate = p.wait_up(d), Gate()
    layers_take(p, LONG_S)
    packets = watch(d)
    link.put(packet(d, "x", (0, 1), [Run(0, 0, 1)], gate.wait), 0.0)
    gate.wait_reached()
    p.step([chunk(d, "later", [1], [5], last=False)])
    d.expect(key_of("now"), [6])
    p.step([chunk(d, "now", [2], [6], last=True)])
    gate.opened.set()
    d.wait_ended(1)
    wait_for(lambda: len(packets) == 3)
    assert [members for _, members in layers_and_members(packets)] == ["x", "now", "later"]


def test_a_prompt_that_ends_takes_its_earlier_packets_with_it(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=5)
    link, gate = p.wait_up(d), Gate()
    layers_take(p, LONG_S)
    packets = watch(d)
    link.put(packet(d, "x", (0, 1), [Run(0, 0, 1)], gate.wait), 0.0)
    gate.wait_reached()
    p.step([chunk(d, "other", [1], [5], last=False)])
    p.step([chunk(d, "mine", [2], [6], last=False)])
    p.step([chunk(d, "mine", [3], [7], last=True)])
    d.expect(key_of("mine"), [6, 7])
    gate.opened.set()
    d.wait_ended(1)
    wait_for(lambda: len(packets) == 4)
    assert [members for _, members in layers_and_members(packets)] == ["x", "mine", "mine", "other"]
    assert d.received


def test_an_urgent_packet_goes_between_the_slices_of_a_large_one(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, link_options={"slice_bytes": 64})
    packets = watch(d)
    gate = hold_move(p, d)
    link = p.links[d.endpoint]
    link.put(packet(d, "large", (0, 5), [Run(0, 0, 1)]), 2.0)
    gate.wait_reached()
    link.put(packet(d, "urgent", (0, 1), [Run(1, 1, 1)]), 1.0)
    gate.opened.set()
    wait_for(lambda: len(packets) == 6)
    assert [members for _, members in layers_and_members(packets)] == ["large", "urgent", *["large"] * 4]


# --- preemption and failure of shared packets -------------------------------------------------------------------------


def test_a_preempted_part_is_left_out_of_a_packet_and_the_rest_is_sent(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=5)
    link, gate = p.wait_up(d), Gate()
    packets = watch(d)
    link.put(packet(d, "x", (0, 1), [Run(0, 0, 1)], gate.wait), 0.0)
    gate.wait_reached()
    for name, block in (("a", 5), ("b", 6)):
        d.expect(key_of(name), [block])
    p.step([chunk(d, "a", [1], [5], last=False), chunk(d, "b", [2], [6], last=False)])
    p.sender.preempt(["a"])
    p.step([chunk(d, "b", [], [], last=True)])
    gate.opened.set()
    d.wait_ended(1)
    assert [item.request for item in d.received] == ["at-d-b"]
    assert layers_and_members(packets)[1:] == [((0, 5), "b")]
    p.step([chunk(d, "a", [8], [5], last=True)])  # resumed, from another block
    d.wait_ended(2)
    assert len(d.received) == 2
    for mine, theirs in zip(p.caches.values(), d.caches.values(), strict=True):
        assert torch.equal(theirs[5], mine[8])
        assert torch.equal(theirs[6], mine[2])


def test_a_packet_that_is_preempted_before_the_device_has_written_it_is_not_sent(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=5)
    p.wait_up(d)
    packets, gate = watch(d), Gate()
    p.use(SimpleNamespace(timed_fence=lambda: SimpleNamespace(wait=gate.wait, seconds_since=lambda earlier: None)))
    p.step([chunk(d, "a", [1], [5], last=False)])
    gate.wait_reached()
    p.sender.preempt(["a"])  # returns: nothing is being read yet
    gate.opened.set()
    p.use(HOST)
    p.step([chunk(d, "b", [2], [6], last=True)], finished=["b"])
    p.wait_over({"b"})
    wait_for(lambda: packets)
    assert [members for _, members in layers_and_members(packets)] == ["b"]


def test_a_preemption_does_not_wait_for_the_slice_that_is_being_read_and_no_other_leaves(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=5, link_options={"slice_bytes": 64})
    packets = watch(d)
    gate = hold_move(p, d)
    p.step([chunk(d, "a", [1], [5], last=False)])
    gate.wait_reached()
    p.sender.preempt(["a"])
    assert not packets
    gate.opened.set()
    p.step([chunk(d, "b", [2], [6], last=True)], finished=["b"])
    wait_for(lambda: "b" in members(packets))
    assert members(packets).count("a") == 1


def test_a_preemption_does_not_wait_for_a_peer_that_returns_no_credit(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=1, staging_bytes=4096)
    p.wait_up(d)
    inside, go = threading.Event(), threading.Event()
    copy = d.side.packet
    d.side.packet = lambda *args: (inside.set(), go.wait(2 * PATIENCE_S), copy(*args))
    p.step([chunk(d, "a", [1], [5], last=False)])
    assert inside.wait(PATIENCE_S)  # the memory is full, the link waits for room
    preempt = threading.Thread(target=lambda: p.sender.preempt(["a"]))
    preempt.start()
    preempt.join(PATIENCE_S / 2)
    waited = preempt.is_alive()
    go.set()
    assert not waited


def test_a_packet_that_fails_ends_all_its_transfers_and_no_other(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=5)
    side = p.wait_up(d)._connection.side
    move: Callable[..., int] = side.move

    def fails_once(*args: Any) -> int:
        side.move = move
        raise LinkError("the wire broke")

    side.move = fails_once
    p.step([chunk(d, "a", [1], [5], last=True), chunk(d, "b", [2], [6], last=True)], finished=["a", "b"])
    p.wait_over({"a", "b"})
    d.expect(key_of("c"), [7])
    p.step([chunk(d, "c", [3], [7], last=True)])
    d.wait_ended(1)
    assert [item.request for item in d.received] == ["at-d-c"]
    same(p, d, {3: 7})


def test_what_waits_while_a_connection_breaks_is_sent_on_the_next_one(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=5)
    link, gate = p.wait_up(d), Gate()

    def breaks() -> None:
        gate.wait()
        raise LinkError("the wire broke")

    link.put(packet(d, "x", (0, 1), [Run(0, 0, 1)], breaks), 0.0)
    gate.wait_reached()
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)])
    gate.opened.set()
    d.wait_ended(1)
    assert d.received


@pytest.mark.parametrize("shares", [True, False])
def test_packets_that_share_the_network_yield_for_a_while(start: Ends, shares: bool) -> None:
    asked: list[float] = []

    def quiet_until(now: float) -> float:
        asked.append(now)
        return now + 3600

    d = start(DecodeEnd)
    p = start(PrefillEnd, grouping=5, link_options={"quiet_until": quiet_until})
    p.wait_up(d)._connection.side.shares_network = shares
    layers_take(p, LONG_S)  # the packet can afford it
    d.expect(key_of("a"), [5])
    began = time.monotonic()
    p.step([chunk(d, "a", [1], [5], last=True)])
    d.wait_ended(1)
    assert d.received
    assert bool(asked) is shares
    assert not shares or time.monotonic() - began >= MAX_YIELD_S


@pytest.mark.parametrize("hooks", [0, 2, 5])
def test_a_step_is_sent_whole_however_many_layers_were_announced(start: Ends, hooks: int) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=2)
    packets = watch(d)
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)], hooks=hooks)
    d.wait_ended(1)
    same(p, d, {1: 5})
    assert packets[-1].layers[1] == 5


FIVE = [f"layer.{index}" for index in range(5)]


@pytest.mark.parametrize(
    ("names", "packets"),
    [
        (["layer.0", "layer.0", "layer.1", "layer.1"], [(0, 2), (2, 5)]),
        (["layer.0", "other", "", "layer.1"], [(0, 2), (2, 5)]),
        (["layer.1", "layer.2", "layer.3"], [(0, 5)]),
        (["layer.1", "layer.0", "layer.2", "layer.3"], [(0, 2), (2, 4), (4, 5)]),
        ([*FIVE, "layer.4", "layer.4"], [(0, 2), (2, 4), (4, 5)]),
    ],
    ids=["twice each", "names of no layer here", "without the first", "out of order", "a drafter's, per guess"],
)
def test_a_packet_leaves_when_its_very_layers_are_written(
    start: Ends, names: list[str], packets: list[tuple[int, int]]
) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=2)
    seen = watch(d)
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)], names=names)
    d.wait_ended(1)
    assert [packet.layers for packet in seen] == packets
    same(p, d, {1: 5})


def test_a_layer_that_no_hook_of_this_step_named_is_not_in_a_packet_that_leaves_before_its_end(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd, grouping=2)
    seen = watch(d)
    d.expect(key_of("a"), [5, 6])
    p.step([chunk(d, "a", [1], [5], last=False)], names=FIVE)
    p.step([chunk(d, "a", [2], [6], last=True)], names=["layer.0"])
    d.wait_ended(1)
    assert [packet.layers for packet in seen][-1] == (0, 5), "what the step before announced does not count"
    same(p, d, {1: 5, 2: 6})


def test_a_link_to_one_that_has_left_closes_once_nothing_is_on_it(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd)
    gate = hold_move(p, d)
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    gate.reached.wait(PATIENCE_S)
    p.sender.part(lambda address: False)
    assert [link.state for link in p.sender.report()] == ["up"]
    gate.opened.set()
    d.wait_ended(1)
    p.wait_over({"a"})
    p.sender.part(lambda address: address == d.endpoint)
    assert len(p.sender.report()) == 1
    p.sender.part(lambda address: False)
    assert p.sender.report() == []
    assert not list(p.folder.glob("staging-*")), "its staging memory is free"


def test_a_link_that_was_closed_opens_again_for_one_that_has_come_back(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd)
    p.wait_up(d)
    p.sender.part(lambda address: False)
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    d.wait_ended(1)
    assert [item.request for item in d.received] == ["at-d-a"]
    same(p, d, {1: 5})


def test_transfers_count_as_open_from_their_first_chunk_to_their_last_word(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd)
    told: list[int] = []
    p.sender._on_open = lambda: told.append(p.sender.open)
    gate = hold_move(p, d)
    for name, block in (("a", 5), ("b", 6)):
        d.expect(key_of(name), [block])
    p.step([chunk(d, "a", [1], [5], last=True), chunk(d, "b", [2], [6], last=True)], finished=["a", "b"])
    assert gate.reached.wait(PATIENCE_S)
    assert p.sender.open == 2
    gate.opened.set()
    d.wait_ended(2)
    wait_for(lambda: not p.sender.open)
    assert told == [1, 0], "only whether there are any is urgent"
