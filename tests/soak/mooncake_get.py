"""What our second tier costs beyond Mooncake: a fetch against the raw client's `get_into` of the same values over TCP.

One process owns the values, another one reads them, with both clients in turn: Mooncake's own with memory registered
beforehand, and `MooncakeStore.fetch_into` as a stage uses it (its size asked first, deadline and breaker around both
calls, codec), with and without verifying the checksum.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

import numpy as np

from bench.clients.process import Child
from bench.micro.measurement import in_turns
from store.errors import StoreError
from store.feature import RECORD_BYTES, Bytes, FeatureMeta, copy_with_checksum, verify_payload
from store.mooncake.client import MooncakeConfig, load_mooncake
from store.mooncake.tier import MooncakeStore

HOST = "127.0.0.1"
KEYS = tuple(f"value-{number}" for number in range(6))
RATIOS = {
    "mooncake_get_over_raw_client_8m": "fetch",
    "mooncake_get_over_raw_client_8m_nosum": "fetch, no checksum",
}
READ_S = 120.0


def timed(variants: Mapping[str, Callable[[int], None]], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Milliseconds of each variant in so many turns, after those that warm up; each is given the turn's number."""
    taken_ms: dict[str, list[float]] = {name: [] for name in variants}
    for turn, name in in_turns(list(variants), warm_up + rounds):
        begun = time.perf_counter()
        variants[name](turn)
        if turn >= warm_up:
            taken_ms[name].append(round((time.perf_counter() - begun) * 1e3, 4))
    return taken_ms


def measure(address: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds per variant, turn by turn, with the master at `address`.

    Raises:
        StageError: a process of it ended or did not answer.
    """
    with contextlib.ExitStack() as stack:
        owner = Child(__name__, address, nbytes)
        stack.callback(owner.stop)
        owner.hear()
        reader = Child(__name__, address, nbytes, rounds)
        stack.callback(reader.stop)
        taken_ms: dict[str, list[float]] = reader.hear(READ_S)
        return taken_ms


def figures(taken_ms: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians of the ratios of one turn: what slows the machine down slows all that take the same turn."""
    return {
        figure: float(np.median(np.divide(taken_ms[variant], taken_ms["raw client"])))
        for figure, variant in RATIOS.items()
    }


def main(pipe: Connection, address: str, nbytes: int, rounds: int = 0) -> None:
    """One of the two processes: owns the values, or reads them in so many rounds."""
    if rounds:
        pipe.send(_read(address, nbytes, rounds))
    else:
        _own(pipe, address, nbytes)


def _own(pipe: Connection, address: str, nbytes: int) -> None:
    """Until it is stopped."""
    segment = 2 * len(KEYS) * (nbytes + RECORD_BYTES)
    store = MooncakeStore.connect(MooncakeConfig(master=address, segment_bytes=segment))
    rng = np.random.default_rng(0)
    source = _memory(nbytes)
    store.register(source.ctypes.data, source.nbytes)
    for key in KEYS:
        digest = copy_with_checksum(source, rng.integers(0, 255, nbytes, np.uint8))
        meta = FeatureMeta(key, (nbytes,), "uint8", nbytes, digest)
        store.put_from(meta, source.ctypes.data, on_failure=lambda: None)
    pipe.send(True)
    pipe.recv()
    store.close()


def _read(address: str, nbytes: int, rounds: int) -> dict[str, list[float]]:
    mooncake = MooncakeConfig(master=address)
    store, target = MooncakeStore.connect(mooncake), _memory(nbytes)
    store.register(target.ctypes.data, target.nbytes)
    raw, raw_target = load_mooncake(HOST).MooncakeDistributedStore(), _memory(nbytes + RECORD_BYTES)
    if raw.setup(HOST, "P2PHANDSHAKE", 0, mooncake.buffer_bytes, "tcp", "", address) != 0:
        raise StoreError("the raw client does not connect")
    raw.register_buffer(raw_target.ctypes.data, raw_target.nbytes)

    def get_raw(turn: int) -> None:
        read = raw.get_into(mooncake.namespace + KEYS[turn % len(KEYS)], raw_target.ctypes.data, raw_target.nbytes)
        if read != raw_target.nbytes:
            raise StoreError(f"the raw client's get: {read} instead of {raw_target.nbytes} bytes")

    def fetch(turn: int, *, verify: bool) -> None:
        key = KEYS[turn % len(KEYS)]
        size = store.size(key)
        meta = store.fetch_into(key, target.ctypes.data, nbytes, on_failure=lambda: None)
        assert meta is not None and size == nbytes
        if verify:
            verify_payload(meta, target)

    variants = {
        "raw client": get_raw,
        "fetch": lambda turn: fetch(turn, verify=True),
        "fetch, no checksum": lambda turn: fetch(turn, verify=False),
    }
    taken_ms = timed(variants, rounds, warm_up=len(KEYS))  # each value once before it counts
    raw.close()
    store.close()
    return taken_ms


def _memory(nbytes: int) -> Bytes:
    """Page-aligned, and there: no page fault is anybody's cost."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    memory[:] = 1
    return memory
