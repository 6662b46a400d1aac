"""What a link does when the other end is gone, another, silent, or does not match."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_serve.engine.kv.link_peer import Peer
from epd_serve.engine.kv.link_transfers import ActiveTransfers
from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.regions import Layers
from epd_serve.engine.kv.shm_send import ShmSendSide
from epd_serve.engine.kv.transport import AwaitMessage, LinkError, SendMessage, SendSide
from epd_serve.kv.plan import LayerPacket, Run
from epd_serve.kv.slices import SLICE_BYTES
from tests.epd_serve.engine.kv.fakes import HOST, DecodeEnd, Ends, PrefillEnd, chunk, key_of, packet, same
from tests.waiting import PATIENCE_S, wait_for


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


def test_a_late_packet_for_a_former_life_does_not_disturb_the_new_one(start: Ends) -> None:
    new = start(DecodeEnd, life="2")
    p = start(PrefillEnd)
    link = p.wait_up(new)
    new.expect(key_of("c"), [9, 10])
    p.step([chunk(new, "c", [4], [9], last=False)])
    wait_for(lambda: bool(new.caches["layer.4"][9].any()))
    p.step([chunk(new, "x", [1], [5], last=True, target="D0:1")], finished=["x"])
    p.wait_over({"x"})
    p.step([chunk(new, "c", [5], [10], last=True)])
    new.wait_ended(1)
    assert new.received
    same(p, new, {4: 9, 5: 10})
    assert link.snapshot().retries == 0


def dead_and_alive(start: Ends, folder: Path, timeout_s: float) -> tuple[PrefillEnd, DecodeEnd, DecodeEnd]:
    """P, and two workers of D: the link to the first has met its death, after so many seconds of silence it says so."""
    dead, alive = DecodeEnd(folder, "D0"), start(DecodeEnd, "D1")
    p = start(PrefillEnd)
    p.wait_up(alive)
    p.timeout_s = timeout_s
    link = p.wait_up(dead)
    dead.close()
    link.put(packet(dead, "q", (0, 1), [Run(0, 0, 1)], target="D0:none"), 0.0)  # makes it reconnect
    return p, dead, alive


def test_a_dead_peer_delays_no_other(start: Ends, tmp_path: Path) -> None:
    p, dead, alive = dead_and_alive(start, tmp_path, timeout_s=3600.0)
    alive.expect(key_of("z"), [5])
    p.step([chunk(dead, "a", [1], [5], last=True), chunk(alive, "z", [1], [5], last=True)])
    alive.wait_ended(1)
    assert alive.received


def test_transfers_to_a_dead_peer_end_within_one_deadline_for_all(
    start: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    p, dead, _ = dead_and_alive(start, tmp_path, timeout_s=0.2)
    names = [f"r{i}" for i in range(6)]
    p.step([chunk(dead, name, [1], [5], last=True) for name in names], finished=names)
    p.wait_over(set(names))
    waits = [record for record in caplog.records if record.levelname == "ERROR" and "silent" in record.getMessage()]
    assert len(waits) <= 2  # the one that q began, and if they came later than that one for all of them


def test_a_stop_does_not_wait_for_a_peer_that_returns_no_credit(start: Ends, tmp_path: Path) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd, staging_bytes=4096)
    link = p.wait_up(d)
    inside, go = threading.Event(), threading.Event()
    copy = d.side.packet
    d.side.packet = lambda *args: (inside.set(), go.wait(2 * PATIENCE_S), copy(*args))
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=False)])
    assert inside.wait(PATIENCE_S)  # the memory is full, the link waits for room
    p.step(stops=["a"])
    assert link.snapshot().state == "up"  # the step was over before the link gave D up
    go.set()
    d.wait_ended(1)
    assert d.failed


def test_a_preemption_does_not_wait_for_a_peer_that_has_stopped(start: Ends) -> None:
    """However many small packets are on their way: ZMQ holds 1000 at either end."""
    d = start(DecodeEnd)
    p = start(PrefillEnd, staging_bytes=16 << 20, grouping=1)
    link = p.wait_up(d)
    go = threading.Event()
    copy = d.side.packet
    d.side.packet = lambda peer, packet, dropped: (go.wait(2 * PATIENCE_S), copy(peer, packet, dropped))
    d.expect(key_of("a"), [5])
    try:
        for _ in range(600):
            p.step([chunk(d, "a", [1], [5], last=False)])
        wait_for(lambda: link.snapshot().queued_bytes == 0)
        p.step(preempted=["a"])
        assert link.snapshot().state == "up"  # the step was over before the link gave D up
    finally:
        go.set()


def test_a_transfer_with_packets_on_a_connection_that_broke_never_gets_its_done(start: Ends) -> None:
    """Packets in flight may be lost with the connection: a later DONE would present a hole as KV."""

    def broken() -> None:
        raise LinkError("the wire broke")

    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("a"), [5, 6])
    p.step([chunk(d, "a", [1], [5], last=False)])
    wait_for(lambda: bool(d.caches["layer.4"][5].any()))
    p.links[d.endpoint].put(packet(d, "q", (0, 1), [Run(0, 0, 1)], broken), 0.0)
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
    p.wait_up(d)

    def broken() -> None:
        raise RuntimeError("device lost")

    p.use(SimpleNamespace(timed_fence=lambda: SimpleNamespace(wait=broken, seconds_since=lambda _: None)))
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    p.wait_over({"a"})
    p.use(HOST)
    d.expect(key_of("b"), [7])
    p.step([chunk(d, "b", [3], [7], last=True)], finished=["b"])
    d.wait_ended(1)
    assert d.received


def test_a_transfer_of_which_a_packet_could_not_be_read_never_gets_its_done(start: Ends) -> None:
    """Nothing of that packet was sent, so D could not tell: the packets that it did get are all there."""
    d = start(DecodeEnd)
    p = start(PrefillEnd, grouping=5)
    p.wait_up(d)

    def broken() -> None:
        raise RuntimeError("device lost")

    d.expect(key_of("a"), [5, 6])
    p.use(SimpleNamespace(timed_fence=lambda: SimpleNamespace(wait=broken, seconds_since=lambda _: None)))
    p.step([chunk(d, "a", [1], [5], last=False)])
    p.use(HOST)
    p.step([chunk(d, "a", [2], [6], last=True)], finished=["a"])
    p.wait_over({"a"})
    d.expect(key_of("b"), [7])
    p.step([chunk(d, "b", [3], [7], last=True)])
    d.wait_ended(1)
    assert [item.request for item in d.received] == ["at-d-b"]


class Unreliable(ShmSendSide):
    """Each move fails while `broken`, and leaves a write that may land until `landed` counts it."""

    broken = False
    left = landed = 0

    def given_up(self) -> int:
        return self.left

    def may_land(self, given_up: int) -> bool:
        return given_up > self.landed

    def move(self, packet: LayerPacket, send: SendMessage, receive: AwaitMessage) -> int:
        if not self.broken:
            return super().move(packet, send, receive)
        self.left += 1
        raise LinkError("the wire broke")


def test_what_failed_is_over_when_its_own_writes_have_landed_whatever_fails_later(start: Ends) -> None:
    """Else P keeps the blocks of all that it sends to a D whose link breaks again and again."""
    d = start(DecodeEnd)
    sides: list[Unreliable] = []

    def unreliable(layers: Layers, path: str) -> list[SendSide]:
        sides.append(Unreliable(layers, path, 1 << 20, HOST, PacketMemory(HOST, SLICE_BYTES)))
        return list(sides)

    p = start(PrefillEnd, sides=unreliable)
    link = p.wait_up(d)
    (side,) = sides
    side.broken = True
    for count, name in enumerate("ab", 1):
        p.step([chunk(d, name, [1], [5], last=True)], finished=[name])
        wait_for(lambda count=count: len(link._failed) == count)

    def unreadable() -> None:
        raise LinkError("nothing is sent")

    p.use(SimpleNamespace(timed_fence=lambda: SimpleNamespace(wait=unreadable, seconds_since=lambda _: None)))
    p.step([chunk(d, "c", [1], [5], last=True)], finished=["c"])
    p.wait_over({"c"})
    assert p.over == {"c"}
    side.landed = 1
    p.wait_over({"a"})
    assert p.over == {"a", "c"}
    side.landed = 2
    p.wait_over({"b"})


def test_an_address_that_is_none_fails_its_transfers_and_no_other(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd)
    d.expect(key_of("b"), [7])
    nowhere = SimpleNamespace(endpoint="nonsense", target="D9:1")
    p.step(
        [chunk(nowhere, "a", [1], [5], last=True), chunk(d, "b", [3], [7], last=True)],  # type: ignore[arg-type]
        finished=["a", "b"],
    )
    p.wait_over({"a", "b"})
    d.wait_ended(1)
    assert d.received
    p.step([chunk(nowhere, "c", [1], [5], last=True)], finished=["c"])  # type: ignore[arg-type]
    p.wait_over({"c"})
    assert "Invalid argument" in p.links["nonsense"].snapshot().reason


class DiedUnnoticed:
    """A connection whose D has died; nobody has looked since. Another life of it answers at the address."""

    reason = ""

    def __init__(self) -> None:
        self.target, self.is_open = "D0:1", True

    def who(self) -> str:
        raise LinkError("decode's end of the connection has closed")

    def close(self) -> None:
        self.target, self.is_open = "", False

    def open(self) -> None:
        self.target, self.is_open = "D0:2", True


def test_a_transfer_for_the_new_life_is_no_victim_of_the_old_ones_death() -> None:
    transfers = ActiveTransfers()
    transfers.answered("D0:1")
    old, new = (SimpleNamespace(key=key_of(name), target=target) for name, target in (("a", "D0:1"), ("b", "D0:2")))
    transfers.sent({old.key})
    peer = Peer("ipc://D0", DiedUnnoticed(), transfers, lambda: None, lambda: None)  # type: ignore[arg-type]

    assert peer.reach([new]) == [new]  # type: ignore[list-item]
    assert peer.state == "up"
    assert transfers.living([old]) == []  # type: ignore[list-item]
