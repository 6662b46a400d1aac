"""What the store costs beyond moving the bytes. A part of `epd-bench transfer ep`.

The arena's put and get are held against a plain copy of the same size, a fetch of the second tier against Mooncake's
own client (where it is installed). All variants of one size take turns within one loop, in an order drawn for every
turn: noisy neighbours and warm caches meet them alike.

Arena: the base is `numpy.copyto` between the same kinds of memory (pre-faulted shared memory on one side, private on
the other), rotating over as many places as the arena has, each time with the private buffer that was left alone
longest. Puts run in a full arena, so each one evicts. Ratios of medians.

Mooncake, over TCP: one process owns the values, another one reads them with both clients: Mooncake's own with memory
registered beforehand, and `MooncakeStore.fetch_into` as a stage uses it (its size asked first, deadline and breaker
around both calls, codec), with and without verifying the checksum. Medians of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

import numpy as np

from bench.clients.process import Child
from bench.micro.ep.links import QUIET, installed_modes, mooncake_master
from bench.micro.measurement import Goal, Row, Usually, in_turns
from store.arena import Arena
from store.errors import StoreError
from store.feature import RECORD_BYTES, Bytes, FeatureMeta, copy_with_checksum, verify_payload
from store.mooncake.client import MooncakeConfig, load_mooncake
from store.mooncake.tier import MooncakeStore

SIZES = {"1m": 1_000_000, "8m": 1196 * 3584 * 2, "19m": 2691 * 3584 * 2}  # 1196 (720p), 2691 (1080p) tokens x 3584 fp16
ARENA_RATIOS = {
    "put_over_memcpy_{}": ("put", "copy in"),
    "get_over_memcpy_{}": ("get", "copy out"),
    "get_over_memcpy_{}_nosum": ("get, no checksum", "copy out"),
}
RAW = "raw client"
MOONCAKE_RATIOS = {
    "mooncake_get_over_raw_client_8m": ("fetch", RAW),
    "mooncake_get_over_raw_client_8m_nosum": ("fetch, no checksum", RAW),
}
GOALS = (
    Goal("put_over_memcpy_8m", "<=", 1.8),
    Goal("get_over_memcpy_8m", "<=", 1.8),
    Goal("get_over_memcpy_8m_nosum", "<=", 1.3),
    Goal("mooncake_get_over_raw_client_8m", "<=", 1.1),
)
SETTINGS = {"copies": Usually(400, quick=100)}
WARM_UP = 10
PLACES = 8
BUFFERS = 5
AGE = 3  # turns between a put and its get; small enough that eviction takes read features only
HOST = "127.0.0.1"
KEYS = tuple(f"value-{number}" for number in range(6))
READ_S = 120.0


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row per size of what each variant took in each turn, and one of Mooncake's."""
    for size, nbytes in SIZES.items():
        yield {"store": "arena", "size": size, "taken_ms": arena_ms(nbytes, arguments.copies)}
    if "mooncake" in installed_modes():
        with mooncake_master() as address:
            yield {"store": "mooncake", "size": "8m", "taken_ms": mooncake_ms(address, SIZES["8m"], arguments.copies)}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`put_over_memcpy_8m`, `get_over_memcpy_8m_nosum`, … per size; `mooncake_get_over_raw_client_8m`."""
    named: dict[str, float] = {}
    for row in rows:
        taken_ms = row["taken_ms"]
        if row["store"] == "arena":
            for name, (of, over) in ARENA_RATIOS.items():
                named[name.format(row["size"])] = float(np.median(taken_ms[of]) / np.median(taken_ms[over]))
        else:
            for name, (of, over) in MOONCAKE_RATIOS.items():
                named[name] = float(np.median(np.divide(taken_ms[of], taken_ms[over])))
    return named


def timed(variants: Mapping[str, Callable[[int], None]], rounds: int, warm_up: int = WARM_UP) -> dict[str, list[float]]:
    """Milliseconds of each variant in so many turns, after those that warm up; each is given the turn's number."""
    taken_ms: dict[str, list[float]] = {name: [] for name in variants}
    for turn, name in in_turns(list(variants), warm_up + rounds):
        begun = time.perf_counter()
        variants[name](turn)
        if turn >= warm_up:
            taken_ms[name].append(round((time.perf_counter() - begun) * 1e3, 4))
    return taken_ms


def arena_ms(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds per variant, turn by turn, of features of `nbytes`."""
    rng = np.random.default_rng(0)
    sources = itertools.cycle([rng.integers(0, 255, nbytes, dtype=np.uint8) for _ in range(BUFFERS)])
    targets = itertools.cycle([np.zeros(nbytes, dtype=np.uint8) for _ in range(BUFFERS)])
    span = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    shared = mmap.mmap(-1, span * PLACES)
    shared.write(bytes(span * PLACES))
    base = [np.frombuffer(shared, dtype=np.uint8)[place * span :][:nbytes] for place in range(PLACES)]

    def put(arena: Arena, turn: int) -> None:
        assert arena.put(f"feature-{turn}", next(sources), shape=(nbytes,), dtype="uint8")

    def get(arena: Arena, turn: int, *, verify: bool = True) -> None:
        lease = arena.lease(f"feature-{turn - AGE}", verify=verify)
        assert lease is not None
        with lease:
            np.copyto(next(targets)[: lease.nbytes], np.frombuffer(lease.view(), np.uint8))

    def lease(arena: Arena, turn: int) -> None:
        held = arena.lease(f"feature-{turn - AGE}", verify=False)
        assert held
        held.release()

    with contextlib.ExitStack() as stack:
        path = f"/dev/shm/epd-bench-{os.getpid()}"
        stack.callback(Arena.unlink, path)
        arena = Arena.create(path, span * PLACES)
        stack.callback(arena.close)
        for turn in range(-AGE, 0):
            put(arena, turn)
        variants: dict[str, Callable[[int], None]] = {
            "copy in": lambda turn: np.copyto(base[turn % PLACES], next(sources)),
            "put": lambda turn: put(arena, turn),
            "copy out": lambda turn: np.copyto(next(targets), base[(turn - AGE) % PLACES]),
            "get": lambda turn: get(arena, turn),
            "get, no checksum": lambda turn: get(arena, turn, verify=False),
            "lease": lambda turn: lease(arena, turn),
        }
        return timed(variants, rounds)


def mooncake_ms(address: str, nbytes: int, rounds: int, warm_up: int = WARM_UP) -> dict[str, list[float]]:
    """Milliseconds per variant, turn by turn, with the master at `address`.

    Raises:
        StageError: a process of it ended or did not answer.
    """
    with contextlib.ExitStack() as stack:
        owner = Child(__name__, address, nbytes, env=QUIET)
        stack.callback(owner.stop)
        owner.hear()
        reader = Child(__name__, address, nbytes, rounds, env=QUIET)
        stack.callback(reader.stop)
        taken_ms: dict[str, list[float]] = reader.hear(READ_S)
        return taken_ms


def main(pipe: Connection, address: str, nbytes: int, rounds: int = 0) -> None:
    """One of the two processes: owns the values until it is stopped, or reads them in so many rounds."""
    if rounds:
        pipe.send(_read(address, nbytes, rounds))
    else:
        _own(pipe, address, nbytes)


def _own(pipe: Connection, address: str, nbytes: int) -> None:
    segment = 2 * len(KEYS) * (nbytes + RECORD_BYTES)
    source = _memory(nbytes)
    store = MooncakeStore.connect(MooncakeConfig(master=address, segment_bytes=segment), source)
    rng = np.random.default_rng(0)
    for key in KEYS:
        digest = copy_with_checksum(source, rng.integers(0, 255, nbytes, np.uint8))
        meta = FeatureMeta(key, (nbytes,), "uint8", nbytes, digest)
        store.put_from(meta, source.ctypes.data, on_failure=lambda: None)
    pipe.send(True)
    pipe.recv()
    store.close()


def _read(address: str, nbytes: int, rounds: int, warm_up: int = WARM_UP) -> dict[str, list[float]]:
    mooncake = MooncakeConfig(master=address)
    target = _memory(nbytes)
    store = MooncakeStore.connect(mooncake, target)
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
        RAW: get_raw,
        "fetch": lambda turn: fetch(turn, verify=True),
        "fetch, no checksum": lambda turn: fetch(turn, verify=False),
    }
    taken_ms = timed(variants, rounds)
    raw.close()
    store.close()
    return taken_ms


def _memory(nbytes: int) -> Bytes:
    """Page-aligned, and there: no page fault is anybody's cost."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    memory[:] = 1
    return memory
