"""The second tier over Mooncake's Ascend transport, on a fake of it that refuses what it refuses.

Memory that CANN did not allocate, threads that have not set the device, a second Transfer Engine in a process.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epd_serve.engine.capture_gate import CaptureGate
from epd_serve.engine.ec.store_access import on_device
from store.arena import Arena
from store.errors import CorruptFeatureError, StoreError
from store.feature import as_bytes
from store.feature_pool import FeaturePool
from store.mooncake import client, tier
from store.mooncake.client import ASCEND, MooncakeClient, MooncakeConfig, begin_engine, process_engine
from store.mooncake.tier import MooncakeStore
from tests.fake_npu.device import FakeDevice
from tests.fake_npu.engine import FakeTransferEngine
from tests.fake_npu.network import FakeNetwork
from tests.fake_npu.store import FakeMaster
from tests.waiting import PATIENCE_S, wait_for

MB = 1 << 20


class Engine(FakeTransferEngine):
    """As KV links use it, which hands itself to a store."""

    def get_engine(self) -> Engine:
        return self


class Node:
    """A process on a device of its own, with what it would import of Mooncake."""

    def __init__(self, master: FakeMaster, network: FakeNetwork, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = FakeDevice(place)
        self.gate = CaptureGate()
        self._module = master.module(self.device)
        self._network, self._patch = network, monkeypatch

    def make_engine(self) -> Engine:
        return Engine(self._network, self.device)

    def imports(self) -> None:
        """From now on this is the process that loads Mooncake."""
        self._patch.setattr(client, "load_mooncake", lambda host: self._module)
        self._patch.setattr(tier, "load_mooncake", lambda host: self._module)
        self._patch.setattr(client, "transfer_engine", self.make_engine)
        self._patch.setattr(client, "_process_engines", [])
        self._patch.setattr(client, "_reach", lambda master, timeout_s: None)

    def config(self, **options: Any) -> MooncakeConfig:
        given = {"protocol": ASCEND, "timeout_s": 10.0, "probe_after_s": 0.02, **on_device(self.device, self.gate)}
        return MooncakeConfig(master="192.0.2.1:1", **{**given, **options})

    def store(self, **options: Any) -> MooncakeStore:
        self.imports()
        return MooncakeStore.connect(self.config(**options), wait_s=PATIENCE_S)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Node]:
    master, network = FakeMaster(), FakeNetwork()
    return lambda place: Node(master, network, place, monkeypatch)


@pytest.fixture
def pools(arena_path: Path, other_path: Path) -> Iterator[Callable[[Path, MooncakeStore], FeaturePool]]:
    made: list[FeaturePool] = []

    def pool(path: Path, remote: MooncakeStore) -> FeaturePool:
        made.append(FeaturePool(Arena.create(path, 64 * MB), remote))
        return made[-1]

    yield pool
    for one in made:
        one.close()


def test_a_feature_goes_from_host_to_host_through_memory_of_the_devices(
    node: Callable[[str], Node], pools: Any, arena_path: Path, other_path: Path
) -> None:
    e, p = node("host0/npu0"), node("host1/npu0")
    encoder, prefill = pools(arena_path, e.store()), pools(other_path, p.store())
    rng = np.random.default_rng(0)
    for number, nbytes in enumerate((1, 5 * MB, 300, 20 * MB)):  # memory of a thread grows, and is kept
        data = rng.integers(0, 255, nbytes, dtype=np.uint8)
        assert encoder.arena.put(f"k{number}", data, shape=(nbytes,), dtype="uint8")
        assert encoder.publish(f"k{number}")
        lease = prefill.fetch(f"k{number}")
        assert lease is not None and bytes(lease.view()) == data.tobytes() and lease.meta.shape == (nbytes,)
        lease.release()
    assert prefill.fetch("missing") is None and prefill.remove("k0")
    assert encoder.arena.stats().leased == prefill.arena.stats().leased == 0
    assert (e.device.broken, p.device.broken) == ([], [])


def test_what_was_damaged_on_the_way_is_found(
    node: Callable[[str], Node], pools: Any, arena_path: Path, other_path: Path
) -> None:
    e, p = node("host0/npu0"), node("host1/npu0")
    encoder, prefill = pools(arena_path, e.store()), pools(other_path, p.store())
    encoder.arena.put("k", bytes(MB), shape=(MB,), dtype="uint8")
    assert encoder.publish("k")
    values = e._module.MooncakeDistributedStore()._values
    (name,) = values
    values[name] = values[name][:7] + b"\x04" + values[name][8:]
    with pytest.raises(CorruptFeatureError):
        prefill.fetch("k")
    assert not values and prefill.arena.stats().used_bytes == 0


def test_memory_that_the_device_did_not_allocate_is_refused_and_the_fix_is_named(
    node: Callable[[str], Node], arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    one = node("host0/npu0")
    one.imports()
    one.device.enter_thread()
    made = MooncakeClient(one.config())
    for foreign in (np.frombuffer(mmap.mmap(-1, MB), dtype=np.uint8), arena.memory()):
        with pytest.raises(
            StoreError, match=r"registering .*DeviceMemory\.host_buffer.*neither mmap nor shared memory"
        ):
            made.register(foreign.ctypes.data, foreign.nbytes)
    assert [rule.rpartition(": ")[2] for rule in one.device.broken] == ["not the device's memory"] * 2

    plain = node("host1/npu0")
    plain.imports()
    store = MooncakeStore(plain.config(host_memory=lambda nbytes: as_bytes(mmap.mmap(-1, nbytes), "plain memory")))
    wait_for(lambda: "DeviceMemory.host_buffer" in caplog.text)
    assert store.client is None and store.guard.state == "down"
    assert caplog.text.count("is still down") == 1, "said once, and tried again less and less often"
    store.close()


def test_a_thread_that_has_not_set_the_device_is_refused(node: Callable[[str], Node]) -> None:
    one = node("host0/npu0")
    one.imports()
    store = MooncakeStore(one.config(begin_thread=lambda: None))
    wait_for(lambda: one.device.broken)
    assert store.guard.state == "down" and "which has not set the device" in one.device.broken[0]
    store.close()


def test_kv_and_features_share_the_engine_of_their_process(node: Callable[[str], Node]) -> None:
    one, other = node("host0/npu0"), node("host0/npu1")
    store = one.store()
    one.device.enter_thread()
    assert process_engine(one.make_engine, "127.0.0.1", ASCEND) is one.device.engine
    store.close()
    assert one.device.broken == []

    other.imports()
    other.device.enter_thread()
    begin_engine(other.make_engine, "127.0.0.1", ASCEND)  # and not by way of the process's
    refused = MooncakeStore(other.config())
    wait_for(lambda: "a second engine in one process" in other.device.broken)
    assert refused.guard.state == "down"
    refused.close()


def test_no_thread_touches_the_device_while_graphs_are_captured(node: Callable[[str], Node]) -> None:
    one = node("host0/npu0")
    one.imports()
    one.gate.close()
    entered: list[str] = []
    one.device.enter_thread = lambda: entered.append(threading.current_thread().name)  # type: ignore[method-assign]
    config = one.config()
    with one.device.capturing():
        store = MooncakeStore(config)
        assert not store.guard.wait_until_up(0.1) and not entered
    one.gate.open()
    wait_for(lambda: entered)
    store.close()


def test_a_process_leaves_no_registered_memory_with_an_engine_that_others_use(node: Callable[[str], Node]) -> None:
    one = node("host0/npu0")
    store = one.store()
    made: Any = store.client
    assert store.size("missing") is None and made._store.regions
    store.close()
    assert made._store.regions == [] and one.device.broken == []
