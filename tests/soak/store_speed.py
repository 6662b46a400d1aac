"""`python -m tests.soak.store_speed`: what the store costs beyond moving the bytes.

The arena's put and get are held against a plain copy of the same size, a fetch of the second tier against Mooncake's
own client (`mooncake_get.py`; where Mooncake is installed).

Base: `numpy.copyto` between the same kinds of memory (pre-faulted shared memory on one side, private memory on the
other), rotating over as many places as the arena has. Puts run in a full arena, so each one evicts. All variants of
one size take turns within one loop, in an order drawn for every turn, each on the private buffer that was left alone
longest: noisy neighbours and warm caches meet them alike. Medians, and ratios of medians.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.micro.ep.links import mooncake_master
from bench.micro.measurement import Goal
from deploy.options.mooncake import what_is_missing
from store.arena import Arena
from tests.soak import mooncake_get
from tests.soak.harness import Result, Soak
from tests.store.conftest import get_into

SIZES = {"1m": 1_000_000, "8m": 1196 * 3584 * 2, "19m": 2691 * 3584 * 2}  # 1196 (720p), 2691 (1080p) tokens x 3584 fp16
RATIOS = {
    "arena_put_over_memcpy_{}": ("put", "copy in"),
    "arena_get_over_memcpy_{}": ("get", "copy out"),
    "arena_get_over_memcpy_{}_nosum": ("get, no checksum", "copy out"),
}
GOALS = (
    *(Goal(name.format("8m"), "<=", 1.3 if name.endswith("nosum") else 1.8) for name in RATIOS),
    Goal("mooncake_get_over_raw_client_8m", "<=", 1.1),
)
ROUNDS, QUICK_ROUNDS = 400, 100
SECOND_TIER = "mooncake_get_8m_ms"
"""Of the row that has what fetches from there took."""
PLACES = 8
BUFFERS = 5
AGE = 3  # turns between a put and its get; small enough that eviction takes read features only


def median_ms(nbytes: int, rounds: int) -> dict[str, float]:
    """Median milliseconds per variant, of features of `nbytes`; a tenth of the rounds warms up."""
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
        assert get_into(arena, f"feature-{turn - AGE}", next(targets), verify=verify)

    def lease(arena: Arena, turn: int) -> None:
        held = arena.lease(f"feature-{turn - AGE}", verify=False)
        assert held
        held.release()

    with contextlib.ExitStack() as stack:
        arena = _arena(stack, span * PLACES)
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
        taken_ms = mooncake_get.timed(variants, rounds - rounds // 10, warm_up=rounds // 10)
    return {name: float(np.median(taken)) for name, taken in taken_ms.items()}


def _arena(stack: contextlib.ExitStack, size_bytes: int) -> Arena:
    """A new arena, gone at the end of the stack."""
    path = f"/dev/shm/epd-bench-{os.getpid()}"
    stack.callback(Arena.unlink, path)
    made = Arena.create(path, size_bytes)
    stack.callback(made.close)
    return made


def measure(arguments: argparse.Namespace) -> Result:
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    rows: list[dict[str, Any]] = [
        {"size": size, "bytes": nbytes, "rounds": rounds, "median_ms": median_ms(nbytes, rounds)}
        for size, nbytes in SIZES.items()
    ]
    missing = what_is_missing("cpu", master=True)
    if not missing:
        with mooncake_master() as address:
            rows.append({SECOND_TIER: mooncake_get.measure(address, SIZES["8m"], rounds)})
    return figures(rows), rows, f"without Mooncake: {missing}" if missing else ""


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`arena_put_over_memcpy_8m`, `arena_get_over_memcpy_8m_nosum`, … per size."""
    named = {
        name.format(row["size"]): row["median_ms"][of] / row["median_ms"][over]
        for row in rows
        if "size" in row
        for name, (of, over) in RATIOS.items()
    }
    for row in rows:
        if SECOND_TIER in row:
            named |= mooncake_get.figures(row[SECOND_TIER])
    return named


SOAK = Soak(
    "store_speed", "the store's put and get against plain copies", measure, (), GOALS, kind="real memory and sockets"
)

if __name__ == "__main__":
    raise SystemExit(SOAK.main())
