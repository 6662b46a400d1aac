"""`epd-bench arena`: what the arena costs beyond moving the bytes: put and get against a plain copy of the same size.

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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from bench.goals import Goal
from bench.micro.measurement import Measurement, Row, Usually, whole
from bench.micro.rows import table_of
from store.arena import Arena

SIZES = {"1m": 1_000_000, "8m": 1196 * 3584 * 2, "19m": 2691 * 3584 * 2}  # 1196 (720p), 2691 (1080p) tokens x 3584 fp16
RATIOS = {
    "arena_put_over_memcpy_{}": ("put", "copy in"),
    "arena_put_over_memcpy_{}_nosum": ("put, no checksum", "copy in"),
    "arena_get_over_memcpy_{}": ("get", "copy out"),
    "arena_get_over_memcpy_{}_nosum": ("get, no checksum", "copy out"),
}
GOALS = tuple(Goal(name.format("8m"), "<=", 1.3 if name.endswith("nosum") else 1.8) for name in RATIOS)
PLACES = 8
BUFFERS = 5
AGE = 3  # turns between a put and its get; small enough that eviction takes read features only


def in_turns(variants: Mapping[str, Callable[[int], None]], turns: range) -> dict[str, list[float]]:
    """Milliseconds of each variant in each turn from 0 on; negative turns are for warming up. The order is drawn."""
    rng = np.random.default_rng(0)
    taken_ms: dict[str, list[float]] = {name: [] for name in variants}
    for turn in turns:
        for name in rng.permutation(list(variants)):
            started = time.perf_counter()
            variants[name](turn)
            if turn >= 0:
                taken_ms[name].append(round((time.perf_counter() - started) * 1e3, 4))
    return taken_ms


def median_ms(nbytes: int, rounds: int) -> dict[str, float]:
    """Median milliseconds per variant, of features of `nbytes`; a tenth of the rounds warms up."""
    rng = np.random.default_rng(0)
    sources = itertools.cycle([rng.integers(0, 255, nbytes, dtype=np.uint8) for _ in range(BUFFERS)])
    targets = itertools.cycle([np.zeros(nbytes, dtype=np.uint8) for _ in range(BUFFERS)])
    span = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    shared = mmap.mmap(-1, span * PLACES)
    shared.write(bytes(span * PLACES))
    base = [np.frombuffer(shared, dtype=np.uint8)[place * span :][:nbytes] for place in range(PLACES)]
    with contextlib.ExitStack() as stack:

        def arena(name: str, *, checksums: bool) -> Arena:
            path = f"/dev/shm/epd-bench-{os.getpid()}-{name}"
            stack.callback(Arena.unlink, path)
            made = Arena.create(path, span * PLACES, checksums=checksums)
            stack.callback(made.close)
            return made

        def put(arena: Arena, turn: int) -> None:
            assert arena.put(f"feature-{turn}", next(sources), shape=(nbytes,), dtype="uint8")

        def get(arena: Arena, turn: int) -> None:
            assert arena.get_into(f"feature-{turn - AGE}", next(targets))

        def lease(turn: int) -> None:
            held = checked.lease(f"feature-{turn - AGE}", verify=False)
            assert held
            held.release()

        checked, plain = arena("checked", checksums=True), arena("plain", checksums=False)
        for turn in range(-AGE - rounds // 10, -rounds // 10):
            put(checked, turn)
            put(plain, turn)
        variants: dict[str, Callable[[int], None]] = {
            "copy in": lambda turn: np.copyto(base[turn % PLACES], next(sources)),
            "put": lambda turn: put(checked, turn),
            "put, no checksum": lambda turn: put(plain, turn),
            "copy out": lambda turn: np.copyto(next(targets), base[(turn - AGE) % PLACES]),
            "get": lambda turn: get(checked, turn),
            "get, no checksum": lambda turn: get(plain, turn),
            "lease": lease,
        }
        taken_ms = in_turns(variants, range(-(rounds // 10), rounds - rounds // 10))
    return {name: float(np.median(taken)) for name, taken in taken_ms.items()}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    for size, nbytes in SIZES.items():
        taken_ms = median_ms(nbytes, arguments.rounds)
        yield {"size": size, "bytes": nbytes, "rounds": arguments.rounds, "median_ms": taken_ms}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`arena_put_over_memcpy_8m`, `arena_put_over_memcpy_8m_nosum`, … per size."""
    return {
        name.format(row["size"]): row["median_ms"][of] / row["median_ms"][over]
        for row in rows
        for name, (of, over) in RATIOS.items()
    }


def tables(rows: Sequence[Row]) -> Iterable[str]:
    """Median milliseconds per size, and ratios to the plain copy."""
    lines = [
        {**row, **{f"{of} / {over}": row["median_ms"][of] / row["median_ms"][over] for of, over in RATIOS.values()}}
        for row in rows
    ]
    medians = {f"{name} ms": f"{{median_ms[{name}]:.3f}}" for name in rows[0]["median_ms"]}
    over = {f"{of} / {base}": f"{{{of} / {base}:.2f}}" for of, base in RATIOS.values()}
    yield table_of(lines, {"size": "{size}", **medians, **over})


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=whole(10), default=Usually(400, 100), help="turns per size (%(default)s)")


MEASUREMENT = Measurement(
    quick="100 turns per size", flags=flags, measure=measure, figures=figures, tables=tables, goals=GOALS
)
add_arguments = MEASUREMENT.add_arguments
