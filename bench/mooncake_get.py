"""What our second tier costs beyond Mooncake: a fetch against the raw client's `get_into` of the same values over TCP.

One process owns the values, another one reads them, with both clients in turn: Mooncake's own with memory registered
beforehand, and `MooncakeStore.fetch_into` as a stage uses it (its size asked first, deadline and breaker around both
calls, codec), with and without verifying the checksum.
"""

from __future__ import annotations

import mmap
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bench.children import Child, Message, answering, commands
from store.checksum import Bytes
from store.codec import TRAILER_BYTES, verify_payload
from store.errors import StoreError
from store.mooncake.client import MooncakeConfig, load_mooncake
from store.mooncake.tier import MooncakeStore

VALUES = 6
HOST = "127.0.0.1"
RATIOS = {
    "mooncake_get_over_raw_client_8m": "fetch",
    "mooncake_get_over_raw_client_8m_nosum": "fetch, no checksum",
}


def measure(master: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds per variant, turn by turn.

    Raises:
        StageError: a process of it ended or did not answer.
    """
    owner = Child("bench.mooncake_get", {"own": True, "master": master, "nbytes": nbytes})
    try:
        assert owner.hear()["ready"]
        reader = Child("bench.mooncake_get", {"own": False, "master": master, "nbytes": nbytes, "rounds": rounds})
        try:
            taken_ms = reader.hear(120)
        finally:
            reader.stop()
    finally:
        owner.stop()
    return taken_ms


def ratios(taken_ms: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians of the ratios of one turn: what slows the machine down slows all that take the same turn."""
    raw = taken_ms["raw client"]
    return {
        figure: statistics.median(ours / theirs for ours, theirs in zip(taken_ms[variant], raw, strict=True))
        for figure, variant in RATIOS.items()
    }


def main() -> None:
    """One of the two processes."""
    answer = answering()
    told = commands()
    config = next(told)
    if config["own"]:
        store = _put_all(config)
        answer(ready=True)
        for _ in told:
            pass
        store.close()
    else:
        answer(**_read_all(config))


def _keys() -> list[str]:
    return [f"value-{number}" for number in range(VALUES)]


def _put_all(config: Message) -> MooncakeStore:
    nbytes = config["nbytes"]
    room = 2 * VALUES * (nbytes + TRAILER_BYTES)
    store = MooncakeStore.connect(MooncakeConfig(master=config["master"], segment_bytes=room))
    rng = np.random.default_rng(0)
    for key in _keys():
        store.put(key, rng.bytes(nbytes), shape=(nbytes,), dtype="uint8")
    return store


def _read_all(config: Message) -> dict[str, list[float]]:
    nbytes, rounds = config["nbytes"], config["rounds"]
    ours = MooncakeConfig(master=config["master"])
    store = MooncakeStore.connect(ours)
    target = _memory(nbytes)
    store.register(target.ctypes.data, target.nbytes)
    raw = load_mooncake(HOST).MooncakeDistributedStore()
    if raw.setup(HOST, "P2PHANDSHAKE", 0, ours.buffer_bytes, "tcp", "", config["master"]) != 0:
        raise StoreError("the raw client does not connect")
    raw_target = _memory(nbytes + TRAILER_BYTES)
    raw.register_buffer(raw_target.ctypes.data, raw_target.nbytes)

    def get_raw(key: str) -> None:
        found = raw.get_into(ours.namespace + key, raw_target.ctypes.data, raw_target.nbytes)
        if found != raw_target.nbytes:
            raise StoreError(f"the raw client's get of {key}: {found}")

    def fetch(key: str, *, verify: bool) -> None:
        size = store.size(key)
        meta = store.fetch_into(key, target.ctypes.data, nbytes, on_failure=lambda: None)
        assert meta is not None and size == nbytes
        if verify:
            verify_payload(meta, target)

    variants: dict[str, Callable[[str], None]] = {
        "raw client": get_raw,
        "fetch": lambda key: fetch(key, verify=True),
        "fetch, no checksum": lambda key: fetch(key, verify=False),
    }
    chance = random.Random(0)
    taken_ms: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-VALUES, rounds):  # each value once before it counts
        for name in chance.sample(list(variants), len(variants)):
            started = time.perf_counter()
            variants[name](_keys()[turn % VALUES])
            if turn >= 0:
                taken_ms[name].append(round((time.perf_counter() - started) * 1e3, 4))
    raw.close()
    store.close()
    return taken_ms


def _memory(nbytes: int) -> Bytes:
    """Page-aligned, and there: no page fault is anybody's cost."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    memory[:] = 1
    return memory


if __name__ == "__main__":
    main()
