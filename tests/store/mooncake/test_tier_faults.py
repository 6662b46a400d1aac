"""The second tier when processes die or stop in the middle. Real processes, a real master."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store.arena import Arena
from store.errors import CorruptFeatureError, StoreFullError, StoreUnavailableError
from store.feature_pool import FeaturePool, open_pool
from store.mooncake.client import MooncakeConfig
from store.mooncake.tier import MooncakeStore
from tests.store.conftest import Child, Master
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.mooncake
MB = 1 << 20

# A process on "another host": its own arena, its own segment. Reads `put KEY BYTES`, answers `done`.
OWNER = """
import os, sys
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
from store.arena import Arena
from store.feature_pool import FeaturePool
from store.mooncake.tier import MooncakeStore
from store.mooncake.client import MooncakeConfig
path, master, namespace = sys.argv[1:]
arena = Arena.create(path, 64 << 20)
remote = MooncakeStore.connect(
    MooncakeConfig(master=master, namespace=namespace, segment_bytes=64 << 20, timeout_s=30.0), arena.memory())
pool = FeaturePool(arena, remote)
print("up", flush=True)
for line in sys.stdin:
    verb, key, nbytes = line.split()
    if verb == "put":
        assert pool.arena.put(key, key.encode() * int(nbytes), shape=(int(nbytes),), dtype="uint8")
        assert pool.publish(key)
    else:  # begin: reserve both tiers, then write for ever
        room = pool.arena.reserve(key, int(nbytes))
        codes = remote.client._store.batch_put_session_start([namespace + key], [int(nbytes)])
        assert room is not None and codes == [0]
    print("done", flush=True)
"""


def tell(owner: Child, command: str) -> None:
    assert owner.stdin and owner.stdout
    owner.stdin.write(command + "\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "done\n"


@pytest.fixture
def start_owner(python: Callable[..., Child], other_path: Path) -> Callable[[MooncakeConfig], Child]:
    def start(config: MooncakeConfig) -> Child:
        owner = python(OWNER, other_path, config.master, config.namespace)
        assert owner.stdout and owner.stdout.readline() == "up\n"
        return owner

    return start


@pytest.fixture
def open_here(arena_path: Path) -> Iterator[Callable[..., FeaturePool]]:
    """A pool of this process with an arena of its own."""
    pools: list[FeaturePool] = []

    def start(config: MooncakeConfig, capacity: int = 64 * MB) -> FeaturePool:
        Arena.create(arena_path, capacity).close()
        pools.append(open_pool(arena=str(arena_path), mooncake=config))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def unanswered(call: Callable[[], object]) -> None:
    with pytest.raises(StoreUnavailableError):
        call()


def refused(call: Callable[[], object]) -> None:
    """Without asking: the breaker is open."""
    with pytest.raises(StoreUnavailableError, match="is down"):
        call()


@pytest.mark.slow
def test_features_cross_hosts_in_place_and_survive_damage_elsewhere(
    shared_master: Master, start_owner: Any, open_here: Any
) -> None:
    config = shared_master.config()
    owner, pool = start_owner(config), open_here(replace(config, segment_bytes=64 * MB))
    assert pool._remote.guard.wait_until_up(PATIENCE_S)
    tell(owner, "put a 5000000")
    assert not pool.arena.contains("a") and pool.arena.lease("a") is None and pool._remote.size("a")
    lease = pool.fetch("a")
    assert lease is not None and bytes(lease.view()) == b"a" * 5000000 and lease.meta.shape == (5000000,)
    lease.release()
    assert pool.arena.contains("a")
    assert pool.fetch("missing") is None

    # Threads that want the same feature fetch it once.
    pool.arena.remove("a")
    puts = pool.arena.stats().puts
    leases: list[Any] = []
    threads = [threading.Thread(target=lambda: leases.append(pool.fetch("a"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(leases) == 4 and all(lease.meta.nbytes == 5000000 for lease in leases)
    assert pool.arena.stats().leased == 1 and pool.arena.stats().puts == puts + 1
    for lease in leases:
        lease.release()

    # A full arena refuses the fetch, and takes it when there is room.
    with pool.arena.lease("a"):
        assert pool.arena.put("filler", bytes(55 * MB), shape=(1,), dtype="uint8")
        tell(owner, "put b 20000000")
        with pool.arena.lease("filler"), pytest.raises(StoreFullError):
            pool.fetch("b")
        fetched = pool.fetch("b")
        assert fetched is not None
        fetched.release()

    # The owner dies in the middle of a put, and of what it had: never wrong, then missing, then ours.
    tell(owner, "begin half 3000000")
    owner.kill()
    owner.wait(10)
    assert pool.fetch("half") is None
    assert pool.arena.put("half", bytes(3000000), shape=(1,), dtype="uint8")
    wait_for(lambda: published(pool, "half"))
    pool.arena.remove("a")
    assert pool.fetch("a") is None, "its bytes are gone, whatever the master thinks"
    assert pool.arena.put("a", b"again", shape=(5,), dtype="uint8")
    wait_for(lambda: published(pool, "a"))


def published(pool: FeaturePool, key: str) -> bool:
    try:
        return pool.publish(key)
    except (StoreUnavailableError, StoreFullError):
        return False


@pytest.mark.slow
def test_a_stopped_owner_costs_a_deadline_then_nothing_and_is_used_again_when_it_goes_on(
    shared_master: Master, start_owner: Any, open_here: Any
) -> None:
    config = shared_master.config(timeout_s=0.5, failures_to_open=2, probe_after_s=0.2)
    owner, pool = start_owner(config), open_here(config)
    assert pool._remote.guard.wait_until_up(PATIENCE_S)
    for key in "abc":
        tell(owner, f"put {key} 4000000")
    os.kill(owner.pid, signal.SIGSTOP)
    try:
        unanswered(lambda: pool.fetch("a"))
        unanswered(lambda: pool.fetch("b"))
        assert pool.state == "down"
        refused(lambda: pool.fetch("c"))
        used = pool.arena.stats().used_bytes
        assert used >= 8000000, "what the stuck transfers may still write stays taken"
        assert pool.arena.put("a", b"recomputed", shape=(10,), dtype="uint8"), "but the keys are free"
        refused(lambda: pool.publish("a"))
    finally:
        os.kill(owner.pid, signal.SIGCONT)
    assert pool._remote.guard.wait_until_up(PATIENCE_S)
    lease = pool.fetch("c")
    assert lease is not None and bytes(lease.view()) == b"c" * 4000000
    lease.release()
    with pool.arena.lease("a") as kept:
        assert bytes(kept.view()) == b"recomputed"
    wait_for(lambda: pool.arena.stats().used_bytes < 4000000 * 2)


def test_a_master_that_dies_and_returns(own_master: Master, open_here: Any) -> None:
    config = own_master.config(segment_bytes=64 * MB, timeout_s=10.0, probe_after_s=0.2)
    own_master.kill()
    pool = open_here(config)
    assert pool.state == "down", "a stage starts without it"
    refused(lambda: pool.fetch("k"))
    assert pool.arena.put("early", b"x", shape=(1,), dtype="uint8"), "the arena works on"
    refused(lambda: pool.publish("early"))
    own_master.start()
    assert pool._remote.guard.wait_until_up(PATIENCE_S)
    assert pool.arena.put("k", b"stored", shape=(6,), dtype="uint8") and pool.publish("k")

    own_master.kill()
    for _ in range(3):
        unanswered(lambda: pool.fetch("x"))
    assert pool.state == "down"
    refused(lambda: pool.fetch("x"))
    assert pool.arena.lease("k") is not None
    own_master.start()
    assert pool._remote.guard.wait_until_up(PATIENCE_S)
    wait_for(lambda: published(pool, "early"))
    pool.arena.remove("early")
    lease = pool.fetch("early")
    assert lease is not None and bytes(lease.view()) == b"x"
    lease.release()


@pytest.mark.slow
def test_a_bit_that_flips_in_the_second_tier_is_found_and_the_value_dropped(
    shared_master: Master, open_here: Any
) -> None:
    pool = open_here(shared_master.config(segment_bytes=64 * MB))
    assert pool._remote.guard.wait_until_up(PATIENCE_S)
    data = np.random.default_rng(0).integers(0, 255, 100_000, dtype=np.uint8)
    for at in (7, 100_000 + 30):  # in the payload, in the record
        pool.arena.put("k", data, shape=(100_000,), dtype="uint8")
        assert pool.publish("k")
        flip_in_segment(pool, "k", at)
        pool.arena.remove("k")
        used = pool.arena.stats().used_bytes
        with pytest.raises(CorruptFeatureError):
            pool.fetch("k")
        assert pool.fetch("k") is None and pool.arena.stats().used_bytes == used


def flip_in_segment(pool: FeaturePool, key: str, at: int) -> None:
    import ctypes

    remote: Any = pool._remote
    place = (
        remote.client._store.get_replica_desc(remote.config.namespace + key)[0]
        .get_memory_descriptor()
        .buffer_descriptor
    )
    ctypes.c_uint8.from_address(place.buffer_address + at).value ^= 4


def test_without_a_second_tier_nothing_of_mooncake_is_imported(arena: Arena, python: Callable[..., Child]) -> None:
    code = (
        "import sys; from store.feature_pool import open_pool; p = open_pool(arena=sys.argv[1]);"
        "print(p.state, p.publish('k'), p.fetch('k'), any(m.split('.')[0] == 'mooncake' for m in sys.modules))"
    )
    output, _ = python(code, arena.path).communicate(timeout=PATIENCE_S)
    assert output == "none False None False\n"


def test_mooncake_store_refuses_to_wait_for_ever(own_master: Master) -> None:
    config = own_master.config()
    own_master.kill()
    with pytest.raises(StoreUnavailableError, match="no Mooncake master"):
        MooncakeStore.connect(config, wait_s=0.3)
