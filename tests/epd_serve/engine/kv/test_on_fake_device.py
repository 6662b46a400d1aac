"""KV from device to device under an NPU's rules: whole, however late the devices get to their work."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_serve.kv.transport_selection import transports_between
from epd_serve.trace import Trace
from tests.epd_serve.engine.kv.device_ends import P_NPU, Pair, Setting
from tests.epd_serve.engine.kv.slow_devices import STALE, Prompt, SlowDevice, ascend_caches, neighbouring_caches
from tests.fake_npu.network import FakeNetwork
from tests.waiting import wait_for

Start = Callable[..., Pair]
TRANSPORTS = ("shm", "mooncake")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A pair whose link is up."""
    pairs: list[Pair] = []

    def make(**options: Any) -> Pair:
        pairs.append(Pair(tmp_path, Setting(**options)))
        assert pairs[-1].open().state == "up", pairs[-1].link().reason
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("grouping", ["layerwise", "fixed:2", "bulk", "adaptive"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kv_arrives_whole_however_late_the_devices_are(start: Start, transport: str, grouping: str) -> None:
    pair = start(transports=(transport,), grouping=grouping)
    a, b = Prompt.make("a", [3, 2, 1], [7, 8, 9]), Prompt.make("b", [6, 10], [0, 15])
    pair.expect(a, b)
    pair.step(a.chunk(), b.chunk())
    pair.run()
    assert pair.wrong(a, b) == []
    assert pair.link().transport.startswith(transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prompts_of_several_steps_arrive_whole(start: Start, transport: str) -> None:
    """Steps are queued one behind the other, as asynchronous scheduling does: the device is behind by all of them."""
    pair = start(transports=(transport,))
    a, b = Prompt.make("a", [3, 2, 1, 12, 11], [7, 8, 9, 1, 2]), Prompt.make("b", [6, 10], [0, 15])
    pair.expect(a, b)
    pair.step(a.chunk(0, 2))
    pair.step(a.chunk(2, 4), b.chunk(0, 1))
    pair.step(a.chunk(4), b.chunk(1))
    pair.run()
    assert pair.wrong(a, b) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_layers_that_no_hook_announced_arrive_whole(start: Start, transport: str) -> None:
    pair = start(transports=(transport,))
    a = Prompt.make("a", [3, 2, 1], [7, 8, 9])
    pair.expect(a)
    pair.step(a.chunk(), hooks=1)
    pair.run()
    assert pair.wrong(a) == []


def test_a_small_staging_memory_is_used_again_only_when_its_packet_was_copied(start: Start) -> None:
    pair = start(staging_bytes=8192, grouping="layerwise")
    a = Prompt.make("a", range(8), reversed(range(8)))
    pair.expect(a)
    pair.step(a.chunk())
    pair.run()
    assert pair.wrong(a) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("there", [ascend_caches, neighbouring_caches])
def test_regions_that_are_neighbours_at_one_end_only_keep_their_bytes_apart(
    start: Start, transport: str, there: Callable[..., Any]
) -> None:
    pair = start(transports=(transport,), p_caches=neighbouring_caches, d_caches=there)
    a = Prompt.make("a", [14, 15, 0], [1, 2, 3])  # V's first block lies behind K's last
    pair.expect(a)
    pair.step(a.chunk())
    pair.run()
    assert pair.wrong(a) == []


def test_a_slow_network_brings_the_same_bytes(start: Start) -> None:
    pair = start(transports=("mooncake",), network=FakeNetwork(latency_s=0.002, bytes_per_s=1e9))
    a = Prompt.make("a", [3, 2, 1], [7, 8, 9])
    pair.expect(a)
    pair.step(a.chunk())
    pair.run()
    assert pair.wrong(a) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transfers_take_no_memory_of_a_device_that_serves(start: Start, transport: str) -> None:
    pair = start(transports=(transport,))
    before = pair.p_device.allocated_bytes, pair.d_device.allocated_bytes
    a = Prompt.make("a", [3, 2, 1], [7, 8, 9])
    pair.expect(a)
    pair.step(a.chunk())
    pair.run()
    assert pair.wrong(a) == []
    assert (pair.p_device.allocated_bytes, pair.d_device.allocated_bytes) == before


def test_prefill_has_ended_when_the_device_has_and_not_when_its_step_was_queued(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    pair = start(trace=Trace(str(path), "P0"))
    a = Prompt.make("a", [3, 2, 1], [7, 8, 9])
    pair.expect(a)
    pair.step(a.chunk())
    queued = time.monotonic()
    assert stamped(path, "prefill_end") == stamped(path, "prefill_step") == []
    pair.run()
    wait_for(lambda: stamped(path, "prefill_end"))
    (step,), (end,) = stamped(path, "prefill_step"), stamped(path, "prefill_end")
    assert step["t0"] < queued < step["t"] <= end["t"]


def stamped(path: Path, event: str) -> list[dict[str, Any]]:
    return [stamp for stamp in map(json.loads, path.read_text().splitlines()) if stamp["event"] == event]


# --- pairs on one device --------------------------------------------------------------------------------------------


def test_a_pair_known_to_share_a_device_tries_nothing_but_shared_memory(start: Start) -> None:
    pair = start(transports=transports_between("auto", "npu", colocated=True), d_place=P_NPU)
    a = Prompt.make("a", [3, 2, 1], [7, 8, 9])
    pair.expect(a)
    pair.step(a.chunk())
    pair.run()
    assert pair.wrong(a) == []
    assert pair.link().transport == "shm"
    assert pair.p_device.engine is None and pair.d_device.engine is None  # not even started: no region is registered


def test_a_pair_on_one_device_falls_back_to_shared_memory(start: Start) -> None:
    pair = start(transports=("mooncake", "shm"), d_place=P_NPU)
    a = Prompt.make("a", [3, 2, 1], [7, 8, 9])
    pair.expect(a)
    pair.step(a.chunk())
    pair.run()
    assert pair.wrong(a) == []
    assert pair.link().transport == "shm"


def test_a_pair_on_one_device_stays_on_it_where_it_can(start: Start) -> None:
    pair = start(transports=("mooncake", "shm"), d_place=P_NPU, network=FakeNetwork(connects_with_self=True))
    assert pair.link().transport == "mooncake/ascend"


def test_a_pair_on_one_device_without_another_transport_says_why_and_fails_what_it_is_given(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Setting(transports=("mooncake",), d_place=P_NPU))
    try:
        link = pair.open()
        assert link.state != "up" and "mooncake/ascend" in link.reason
        a = Prompt.make("a", [1], [7])
        pair.expect(a)
        pair.step(a.chunk())
        pair.run()
        assert pair.link().failed == 1
        assert pair.at_d().eq(STALE).all()
    finally:
        pair.close()


def test_a_preempted_prompt_is_sent_again_from_where_it_is_computed_again(start: Start) -> None:
    pair = start(transports=("mooncake",))
    a = Prompt.make("a", [3, 2, 1], [7, 8, 9])
    again = Prompt("a", (12, 13, 14), a.dst, a.kv)
    other = Prompt.make("b", [3, 2], [4, 5])
    pair.expect(a, other)
    pair.step(a.chunk(0, 2))
    pair.step(other.chunk(), preempted=["a"])
    pair.step(again.chunk())
    pair.run()
    assert pair.wrong(again, other) == []


def test_a_transfer_is_not_over_while_a_write_of_it_may_still_land(start: Start) -> None:
    """P's scheduler says of what is over that nothing is written any more, and D gives its blocks to others."""
    pair = start(transports=("mooncake",), protocol="tcp", timeout_s=0.5)
    a = Prompt.make("a", [3, 2, 1], [7, 8, 9])
    pair.expect(a)
    pair.hang_in(a)
    wait_for(lambda: pair.link().reason)
    assert not threading.Event().wait(0.2) and not pair.over_at_p()
    pair.network.gate.set()
    wait_for(pair.over_at_p)
    written = pair.at_d()
    assert not written.eq(STALE).all()
    assert pair.link().failed == 1


def test_staging_memory_is_registered_at_both_ends_while_the_link_lives(start: Start) -> None:
    pair = start()
    assert len(pair.p_device.registered) == len(pair.d_device.registered) == 1
    pair.close()
    assert not pair.p_device.registered and not pair.d_device.registered
    assert not pair.p_device.broken and not pair.d_device.broken


@pytest.mark.parametrize("end", ["p_device", "d_device"])
def test_kv_arrives_through_memory_that_a_device_cannot_register(start: Start, end: str) -> None:
    pair = start(**{end: lambda place: SlowDevice(place, registers=False)})
    a = Prompt.make("a", [3, 2, 1], [7, 8, 9])
    pair.expect(a)
    pair.step(a.chunk())
    pair.run()
    assert pair.wrong(a) == []
