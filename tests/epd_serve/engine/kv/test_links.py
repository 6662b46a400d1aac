"""P worker to D worker over real sockets and shared memory, without vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from epd_serve import wire
from epd_serve.engine.kv.link import DoneJob, Outgoing
from tests.epd_serve.engine.kv.fakes import DecodeEnd, PrefillEnd, chunk, key_of, shape, wait_for

Ends = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Ends]:
    """Starts ends that are closed when the test ends (P first, as its links may wait for D)."""
    ends: list[Any] = []

    def make(kind: type, *args: Any, **options: Any) -> Any:
        ends.append(kind(tmp_path, *args, **options))
        return ends[-1]

    yield make
    for end in sorted(ends, key=lambda end: isinstance(end, DecodeEnd)):
        end.close()
    assert not list(tmp_path.glob("staging-*"))


def same(p: PrefillEnd, d: DecodeEnd, pairs: dict[int, int]) -> None:
    """D's blocks equal P's for the pairs (source: destination) and are untouched elsewhere."""
    for mine, theirs in zip(p.caches.values(), d.caches.values(), strict=True):
        wanted = torch.zeros_like(theirs)
        for src, dst in pairs.items():
            wanted[dst] = mine[src]
        assert torch.equal(wanted, theirs)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 9])
def test_every_block_of_every_layer_arrives_and_nothing_else_changes(start: Ends, group: int) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd, group=group)
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
    p = start(PrefillEnd, group=3, staging_bytes=staging_bytes, **options)
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
    assert not p.sender.take_over(names, idle=False)  # reported once
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
    assert not p.sender.take_over(["a"], idle=True)
    p.step([chunk(d, "a", [2], [6], last=True)])
    d.wait_ended(1)
    p.wait_over({"a"})


def test_done_that_comes_before_the_step_is_kept(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
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
    p.step([chunk(d, "warm", [0], [0], last=True)])
    link, hold = p.links[d.endpoint], threading.Event()
    blocker = Outgoing(key_of("b"), "b", d.target)
    link.put(_waiting(blocker, hold))  # keeps the link busy
    p.step([chunk(d, "a", [1], [5], last=True)])
    p.step(preempted=["a"])
    hold.set()
    d.wait_ended(1)
    assert d.failed
    assert not d.received


def _waiting(out: Outgoing, hold: threading.Event) -> Any:
    from epd_serve.engine.kv.link import PacketJob
    from epd_serve.engine.kv.transport import LayerPacket

    def written() -> None:
        assert hold.wait(5)

    return PacketJob(out, out.generation, LayerPacket(0, 1, ((out.key, ()),)), written)


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
        assert go.wait(5)
        copy(peer, packet, dropped)

    d.side.packet = slow
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=False)])
    assert inside.wait(5)
    d.fail(key_of("a"))
    reported = threading.Event()
    reporter = threading.Thread(target=lambda: (d.poll(), reported.set()))
    reporter.start()
    assert not reported.wait(0.05)  # the blocks may not be given back yet
    go.set()
    reporter.join(5)
    assert d.failed


@pytest.mark.parametrize(
    ("change", "named"), [({"dtype": "torch.float16"}, "dtype"), ({"block_size": 16}, "block_size")]
)
def test_ends_that_do_not_match_are_refused_by_name(
    start: Ends, caplog: pytest.LogCaptureFixture, change: dict[str, Any], named: str
) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd, **change)
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    p.wait_over({"a"})
    assert f"refused: {named}: " in caplog.text
    assert not d.caches["layer.0"].any()
    assert not d.poll()


def test_a_new_life_of_decode_takes_new_transfers_and_old_ones_end(start: Ends, tmp_path: Path) -> None:
    old = DecodeEnd(tmp_path)
    p = start(PrefillEnd)
    old.expect(key_of("a"), [5, 6])
    p.step([chunk(old, "a", [1], [5], last=False)])
    wait_for(lambda: bool(old.caches["layer.4"][5].any()))
    old.close()
    new = start(DecodeEnd, life="2")
    new.expect(key_of("b"), [7])
    p.step([chunk(new, "b", [3], [7], last=True)], finished=["b"])
    p.step([chunk(old, "a", [2], [6], last=True)], finished=["a"])
    new.wait_ended(1)
    same(p, new, {3: 7})
    p.wait_over({"a", "b"})


def test_a_late_job_for_a_former_life_does_not_disturb_the_new_one(start: Ends) -> None:
    new = start(DecodeEnd, life="2")
    p = start(PrefillEnd)
    new.expect(key_of("b"), [7, 8])
    new.expect(key_of("c"), [9, 10])
    former = chunk(new, "a", [1], [5], last=False).__class__
    p.step([former(key_of("a"), "a", "D0:1", (new.endpoint,), (1,), (5,), False)])  # finds that D0:1 is gone
    p.step([chunk(new, "c", [4], [9], last=False)])
    p.step([former(key_of("x"), "x", "D0:1", (new.endpoint,), (1,), (5,), True)], finished=["x"])
    p.step([chunk(new, "c", [5], [10], last=True)])
    new.wait_ended(1)
    assert new.received
    same(p, new, {4: 9, 5: 10})
    p.wait_over({"x"})


def test_a_dead_peer_ends_its_transfers_within_the_deadline_and_delays_no_other(start: Ends, tmp_path: Path) -> None:
    dead = DecodeEnd(tmp_path, "D0")
    alive = start(DecodeEnd, "D1")
    p = start(PrefillEnd, timeout_s=0.4)
    p.sender.warm([dead.endpoint, alive.endpoint])
    p.step([chunk(dead, "warm", [0], [0], last=True)], finished=["warm"])
    p.wait_over({"warm"})
    dead.close()
    names = [f"r{i}" for i in range(6)]
    alive.expect(key_of("z"), [5])
    began = time.monotonic()
    p.links[dead.endpoint].put(DoneJob(Outgoing(key_of("q"), "q", "D0:none"), 0, True))  # makes the link reconnect
    p.step([*(chunk(dead, name, [1], [5], last=True) for name in names), chunk(alive, "z", [1], [5], last=True)])
    alive.wait_ended(1)
    assert time.monotonic() - began < 0.4
    p.step(finished=[*names, "z"])
    p.wait_over({*names, "z"}, deadline_s=2.5)
    assert time.monotonic() - began < 2.0  # not one deadline per transfer


def test_a_stop_does_not_wait_for_a_peer_that_returns_no_credit(start: Ends, tmp_path: Path) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd, staging_bytes=4096, timeout_s=1.0)
    go = threading.Event()
    copy = d.side.packet
    d.side.packet = lambda peer, packet, dropped: (go.wait(5), copy(peer, packet, dropped))
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=False)])
    link = p.links[d.endpoint]
    wait_for(lambda: link._side._seq >= 2)  # waits for room
    began = time.monotonic()
    p.step(stops=["a"])
    assert time.monotonic() - began < 0.3
    go.set()
    d.wait_ended(1)
    assert d.failed


def test_a_transfer_with_packets_on_a_connection_that_broke_never_gets_its_done(start: Ends) -> None:
    """Packets in flight may be lost with the connection: a later DONE would present a hole as KV."""
    d = start(DecodeEnd)
    p = start(PrefillEnd, timeout_s=0.3)
    d.expect(key_of("a"), [5, 6])
    p.step([chunk(d, "a", [1], [5], last=False)])
    wait_for(lambda: bool(d.caches["layer.4"][5].any()))
    stranger = Outgoing(key_of("q"), "q", "D0:gone")
    p.links[d.endpoint].put(DoneJob(stranger, 0, True))  # the link looks for another life of D and fails
    p.step([chunk(d, "a", [2], [6], last=True)], finished=["a"])
    p.wait_over({"a"})
    assert not d.poll()
    d.expect(key_of("b"), [7])
    p.step([chunk(d, "b", [3], [7], last=True)])
    d.wait_ended(1)
    assert [item.request for item in d.received] == ["at-d-b"]


def test_the_link_survives_an_unforeseen_error(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    p.sender.warm([d.endpoint])

    def broken() -> None:
        raise RuntimeError("device lost")

    p.sender._mark_written = lambda: broken
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    p.wait_over({"a"})
    p.sender._mark_written = lambda: lambda: None
    d.expect(key_of("b"), [7])
    p.step([chunk(d, "b", [3], [7], last=True)], finished=["b"])
    d.wait_ended(1)
    assert d.received


# --- D against a peer that misbehaves -------------------------------------------------------------------------------


@pytest.fixture
def stranger() -> Iterator[zmq.Socket[bytes]]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    yield socket
    socket.close()


def test_done_from_a_connection_without_handshake_is_a_failure(start: Ends, stranger: zmq.Socket[bytes]) -> None:
    d = start(DecodeEnd)
    d.expect(key_of("a"), [5])
    stranger.connect(d.endpoint)
    stranger.send(wire.encode(wire.Done(key_of("a"), True)))
    d.wait_ended(1)
    assert d.failed


@pytest.mark.parametrize(
    "packet",
    [
        wire.Packet(1, 0, (0, 2), [(key_of("a"), [(5, 1)])]),
        wire.Packet(1, 0, (0, 99), [(key_of("a"), [(5, 1)])]),
        wire.Packet(1, 0, (0, 2), [(key_of("a"), [(31, 2)])]),
        wire.Packet(1, 1 << 40, (0, 2), [(key_of("a"), [(5, 1)])]),
        wire.Packet(1, 0, (0, 2), [(key_of("a"), [(-1, 1)])]),
    ],
)
def test_a_packet_that_cannot_be_written_fails_its_transfer_and_not_the_worker(
    start: Ends, stranger: zmq.Socket[bytes], packet: wire.Packet
) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), [5])
    d.expect(key_of("b"), [7])
    p.sender.warm([d.endpoint])
    p.step([chunk(d, "b", [1], [7], last=False)])
    wait_for(lambda: bool(d.caches["layer.4"][7].any()))
    if packet.offset or packet.layers != (0, 2) or packet.parts[0][1] != [(5, 1)]:
        p.links[d.endpoint]._socket.send(wire.encode(packet))  # after a handshake
    else:
        stranger.connect(d.endpoint)
        stranger.send(wire.encode(packet))
    d.wait_ended(1)
    assert [item.request for item in d.failed] == ["at-d-a"]
    p.step([chunk(d, "b", [2], [8], last=True)])
    d.wait_ended(2)
    assert [item.request for item in d.received] == ["at-d-b"]


@pytest.mark.parametrize(("path", "size"), [("nowhere", 4096), ("memory", 1 << 20), ("memory", 0)])
def test_staging_memory_that_cannot_be_mapped_is_refused_not_met_with_silence(
    start: Ends, stranger: zmq.Socket[bytes], tmp_path: Path, path: str, size: int
) -> None:
    d = start(DecodeEnd)
    (tmp_path / "memory").write_bytes(bytes(100) if size else b"")
    stranger.connect(d.endpoint)
    stranger.send(wire.encode(wire.Hello(wire.VERSION, "P0:1", "shm", shape(d.layers), str(tmp_path / path), size)))
    assert stranger.poll(5000)
    answer = wire.to_prefill_worker.decode(stranger.recv())
    assert isinstance(answer, wire.HelloRefused)
    assert "staging memory" in answer.reason


def test_garbage_does_not_end_the_listener(start: Ends, stranger: zmq.Socket[bytes]) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    stranger.connect(d.endpoint)
    stranger.send(b"\xff\xff")
    stranger.send_multipart([b"one", b"two", b"three"])
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)])
    d.wait_ended(1)
    assert d.received
