"""How a link comes up: which transport it takes, what it says where none will do, and when it tries again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from deploy.host.ports import free_ports
from epd_serve.engine.capture_gate import CaptureGate
from epd_serve.engine.kv.link_cost import MeasuredCost
from epd_serve.engine.kv.packet_memory import PacketMemory
from epd_serve.engine.kv.regions import Layers, layers_of
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.engine.kv.shm_send import ShmSendSide
from epd_serve.engine.kv.transport import LinkError, SendSide
from epd_serve.kv.slices import SLICE_BYTES
from epd_serve.kv.transport_selection import why_not
from tests.epd_serve.engine.kv.fakes import HOST, DecodeEnd, Ends, PrefillEnd, caches, chunk, key_of, same
from tests.waiting import PATIENCE_S, wait_for


class Other(ShmSendSide):
    """A transport of another name. `carries`: whether bytes get through once it is open."""

    name = "other"

    def __init__(self, layers: Layers, path: str, *, label: str, carries: bool = True, name: str = "other") -> None:
        super().__init__(layers, path + label, 1 << 20, HOST, PacketMemory(HOST, SLICE_BYTES))
        self.name, self.label = name, label
        self._carries = carries

    def probe(self, *args: Any) -> None:
        if not self._carries:
            raise LinkError("nothing got through")
        super().probe(*args)


def shm(layers: Layers, path: str) -> SendSide:
    return ShmSendSide(layers, path, 1 << 20, HOST, PacketMemory(HOST, SLICE_BYTES))


def test_the_preferred_transport_is_taken_where_it_works(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd, sides=lambda layers, path: [shm(layers, path), Other(layers, path, label="second")])
    assert p.wait_up(d).snapshot().transport == "shm"


def test_a_transport_that_decode_refuses_gives_way_to_the_next(start: Ends, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    d = start(DecodeEnd)
    p = start(PrefillEnd, sides=lambda layers, path: [Other(layers, path, label="fast"), shm(layers, path)])
    assert p.wait_up(d).snapshot().transport == "shm"
    assert "uses shm (fast: refused: transport: shm here, other there)" in caplog.text
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)])
    d.wait_ended(1)
    same(p, d, {1: 5})


def test_a_transport_that_opens_and_carries_nothing_gives_way_to_the_next(start: Ends) -> None:
    d = start(DecodeEnd)
    p = start(
        PrefillEnd,
        sides=lambda layers, path: [Other(layers, path, label="fast", name="shm", carries=False), shm(layers, path)],
    )
    link = p.wait_up(d)
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)])
    d.wait_ended(1)
    assert d.received
    assert link.snapshot().transport == "shm"


def test_where_no_transport_will_do_each_is_named_with_its_reason(
    start: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    d = start(DecodeEnd)
    p = start(
        PrefillEnd,
        sides=lambda layers, path: [
            Other(layers, path, label="fast"),
            Other(layers, path, label="slow", name="shm", carries=False),
        ],
    )
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    p.wait_over({"a"})
    reason = "fast: refused: transport: shm here, other there; slow: nothing got through"
    assert reason in caplog.text
    found = p.links[d.endpoint].snapshot()
    assert (found.state, found.reason, found.transport) == ("opening", reason, "")


def test_a_decode_that_starts_does_not_cost_the_link_its_first_choice(start: Ends) -> None:
    """Its gate opens while the link asks: the second hello of that attempt would be accepted."""
    offered: list[str] = []

    class First(Other):
        def hello(self) -> tuple[str, int]:
            offered.append(self.label)
            return super().hello()

    class Gate(CaptureGate):
        def passed(self, wait_s: float = 0.0) -> bool:
            return bool(offered)

    d = start(DecodeEnd, receiver_options={"gate": Gate()})
    p = start(
        PrefillEnd,
        sides=lambda layers, path: [
            First(layers, path, label="first", name="shm"),
            Other(layers, path, label="second", name="shm"),
        ],
    )
    assert p.wait_up(d).snapshot().transport == "first"


def test_staging_memory_that_cannot_be_made_is_a_reason(start: Ends, caplog: pytest.LogCaptureFixture) -> None:
    d = start(DecodeEnd)
    p = start(PrefillEnd, sides=lambda layers, path: [shm(layers, path + "/nowhere/x")])
    p.step([chunk(d, "a", [1], [5], last=True)], finished=["a"])
    p.wait_over({"a"})
    assert "shm: staging memory " in caplog.text
    assert "cannot be made" in caplog.text


def test_probes_measure_the_link_before_traffic(start: Ends) -> None:
    d, p = start(DecodeEnd), start(PrefillEnd)
    found = p.wait_up(d).snapshot()
    before = MeasuredCost().now()
    assert (found.setup_s, found.s_per_byte) != (before.setup_s, before.s_per_byte)
    assert (found.packets, found.bytes, found.queued_bytes) == (0, 0, 0)


def test_a_decode_that_starts_later_is_found_without_traffic(start: Ends, tmp_path: Path) -> None:
    p = start(PrefillEnd, timeout_s=0.25)
    p.sender.meet([[f"ipc://{tmp_path}/D0.kvw0"]])
    (link,) = p.links.values()
    wait_for(lambda: "silent" in link.snapshot().reason)
    assert link.snapshot().state == "opening"
    d = start(DecodeEnd)
    wait_for(lambda: (link.snapshot().state, link.snapshot().reason) == ("up", ""))
    assert (link.snapshot().peer, link.snapshot().retries) == ("D0", 0)
    assert p.links.keys() == {d.endpoint}


def test_a_link_that_lost_its_peer_is_down_until_the_next_life(start: Ends, tmp_path: Path) -> None:
    old = DecodeEnd(tmp_path)
    p = start(PrefillEnd, timeout_s=0.25, staging_bytes=4096, grouping=1)
    link = p.wait_up(old)
    old.close()
    p.step([chunk(old, "a", [1], [5], last=True)], finished=["a"])  # its second packet finds no room
    p.wait_over({"a"})
    assert link.snapshot().state == "down"
    start(DecodeEnd, life="2")
    wait_for(lambda: link.snapshot().state == "up")
    assert (link.snapshot().retries, link.snapshot().failed) == (1, 1)


def test_an_idle_link_notices_that_its_peer_died_and_finds_the_next_life(start: Ends, tmp_path: Path) -> None:
    old = DecodeEnd(tmp_path)
    p = start(PrefillEnd, timeout_s=0.25)
    link = p.wait_up(old)
    old.close()
    wait_for(lambda: link.snapshot().state == "down")
    start(DecodeEnd, life="2")
    wait_for(lambda: link.snapshot().state == "up")
    assert (link.snapshot().retries, link.snapshot().failed) == (1, 0)


def test_a_link_that_waits_for_its_peer_closes_at_once(start: Ends, tmp_path: Path) -> None:
    p = start(PrefillEnd, timeout_s=3600.0)
    p.sender.meet([[f"ipc://{tmp_path}/nobody"]])
    (link,) = p.links.values()
    link.close()
    assert not link._thread.is_alive()


def test_between_nodes_shared_memory_gives_way_whatever_the_address_and_the_report_says_why(
    start: Ends, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef")
    (port,) = free_ports(1)
    kv = caches(5, 32, filled=False)
    ends = [ShmReceiveSide(layers_of(kv, 32), HOST, PacketMemory(HOST, SLICE_BYTES)) for _ in range(2)]
    ends[1].name = "mooncake"
    d = start(
        DecodeEnd,
        kv=kv,
        sides=ends,
        endpoint=f"tcp://127.0.0.1:{port}",
        receiver_options={
            "node": "b",
            "why_not": lambda transport, node: why_not(transport, "auto", "cpu", here="b", there=node),
            "key_file": str(key),
        },
    )
    p = start(
        PrefillEnd,
        sides=lambda layers, path: [shm(layers, path), Other(layers, path, label="far", name="mooncake")],
        link_options={"node": "a", "key_file": str(key)},
    )
    found = p.wait_up(d).snapshot()
    assert found.transport == "far"
    assert "shm: refused: shared memory joins workers of one node: b here, a there" in found.reason
    assert "from node a to node b" in found.reason
    d.expect(key_of("a"), [5])
    p.step([chunk(d, "a", [1], [5], last=True)])
    d.wait_ended(1)
    same(p, d, {1: 5})


def test_a_link_without_the_key_says_so(start: Ends) -> None:
    p = start(PrefillEnd, timeout_s=0.25)
    p.sender.meet([["tcp://127.0.0.1:9"]])
    (link,) = p.links.values()
    wait_for(lambda: "key" in link.snapshot().reason)
    assert link.snapshot().state == "opening"


def test_a_link_whose_other_end_has_another_key_says_what_may_be_wrong(start: Ends, tmp_path: Path) -> None:
    keys = [tmp_path / "one", tmp_path / "other"]
    for key in keys:
        key.touch(mode=0o600)
        key.write_text(f"the-key-called-{key.name}")
    (port,) = free_ports(1)
    d = start(DecodeEnd, endpoint=f"tcp://127.0.0.1:{port}", receiver_options={"key_file": str(keys[0])})
    p = start(PrefillEnd, timeout_s=PATIENCE_S, link_options={"key_file": str(keys[1])})
    p.sender.meet([[d.endpoint]])
    (link,) = p.links.values()
    wait_for(lambda: "keys of the two differ" in link.snapshot().reason)
    assert link.snapshot().state == "opening"
