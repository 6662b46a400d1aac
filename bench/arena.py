"""`epd-bench arena`: what the arena costs beyond moving the bytes: put and get against a plain copy of the same size.

Base: `numpy.copyto` between the same kinds of memory (pre-faulted shared memory on one side, private memory on the
other), rotating over as many places as the arena has. Puts run in a full arena, so each one evicts. All variants of
one size take turns within one loop, in an order drawn for every turn, each on the private buffer that was left alone
longest: noisy neighbours and warm caches meet them alike. Medians, and ratios of medians.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.goals import Goal, goal_table
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, write
from deploy.placement_table import table
from store.arena import Arena

SIZES = {"1m": 1_000_000, "8m": 1196 * 3584 * 2, "19m": 2691 * 3584 * 2}  # 1196 (720p), 2691 (1080p) tokens x 3584 fp16
RATIOS = {
    "arena_put_over_memcpy": ("put", "copy in"),
    "arena_put_over_memcpy_nosum": ("put, no checksum", "copy in"),
    "arena_get_over_memcpy": ("get", "copy out"),
    "arena_get_over_memcpy_nosum": ("get, no checksum", "copy out"),
}
GOALS = (
    Goal("arena_put_over_memcpy_8m", "<=", 1.8),
    Goal("arena_put_over_memcpy_8m_nosum", "<=", 1.3),
    Goal("arena_get_over_memcpy_8m", "<=", 1.8),
    Goal("arena_get_over_memcpy_8m_nosum", "<=", 1.3),
)
PLACES = 8
BUFFERS = 5
AGE = 3  # turns between a put and its get; small enough that eviction takes read features only


def measure(nbytes: int, rounds: int) -> dict[str, float]:
    """Median milliseconds per variant."""
    rng = np.random.default_rng(0)
    sources = [rng.integers(0, 255, nbytes, dtype=np.uint8) for _ in range(BUFFERS)]
    targets = [np.zeros(nbytes, dtype=np.uint8) for _ in range(BUFFERS)]
    span = -(-nbytes // 4096) * 4096
    paths = {name: f"/dev/shm/epd-bench-{os.getpid()}-{name}" for name in ("plain", "checked")}
    shared = mmap.mmap(-1, span * PLACES)
    shared.write(bytes(span * PLACES))
    base = [np.frombuffer(shared, dtype=np.uint8)[place * span :][:nbytes] for place in range(PLACES)]
    arenas = {name: Arena.create(path, span * PLACES, checksums=name == "checked") for name, path in paths.items()}

    private = itertools.count()

    def copy_in(turn: int) -> None:
        np.copyto(base[turn % PLACES], sources[next(private) % BUFFERS])

    def copy_out(turn: int) -> None:
        np.copyto(targets[next(private) % BUFFERS], base[(turn - AGE) % PLACES])

    def put(name: str) -> Callable[[int], None]:
        arena = arenas[name]

        def variant(turn: int) -> None:
            assert arena.put(f"feature-{turn}", sources[next(private) % BUFFERS], shape=(nbytes,), dtype="uint8")

        return variant

    def get(name: str) -> Callable[[int], None]:
        arena = arenas[name]

        def variant(turn: int) -> None:
            assert arena.get_into(f"feature-{turn - AGE}", targets[next(private) % BUFFERS])

        return variant

    def lease(turn: int) -> None:
        held = arenas["checked"].lease(f"feature-{turn - AGE}", verify=False)
        assert held
        held.release()

    variants: dict[str, Callable[[int], None]] = {
        "copy in": copy_in,
        "put": put("checked"),
        "put, no checksum": put("plain"),
        "copy out": copy_out,
        "get": get("checked"),
        "get, no checksum": get("plain"),
        "lease": lease,
    }
    taken_s: dict[str, list[float]] = {name: [] for name in variants}
    try:
        for turn in range(-AGE, 0):
            for name in ("put", "put, no checksum"):
                variants[name](turn)
        for turn in range(rounds):
            for name in rng.permutation(list(variants)):
                started = time.perf_counter()
                variants[name](turn)
                taken_s[name].append(time.perf_counter() - started)
    finally:
        for name, arena in arenas.items():
            arena.close()
            Arena.unlink(paths[name])
    return {name: statistics.median(taken[rounds // 10 :]) * 1e3 for name, taken in taken_s.items()}


def ratios(size: str, median_ms: Mapping[str, float]) -> dict[str, float]:
    """The named figures of one size: `arena_put_over_memcpy_8m`, `arena_put_over_memcpy_8m_nosum`, …"""
    found = {}
    for name, (of, over) in RATIOS.items():
        stem, _, suffix = name.partition("memcpy")
        found[f"{stem}memcpy_{size}{suffix}"] = median_ms[of] / median_ms[over]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="turns per size (default 400, quick 100)")
    add_record_arguments(parser, quick="100 turns per size")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure every size, print the table, write the result."""
    env = environment(argv, asked=arguments)
    rounds = arguments.rounds or (100 if arguments.quick else 400)
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for size, nbytes in SIZES.items():
        times = measure(nbytes, rounds)
        figures |= ratios(size, times)
        rows.append({"size": size, "bytes": nbytes, "rounds": rounds, "median_ms": times})
    print(f"{text(rows)}\n\n{goal_table(figures, GOALS)}\n\nReal; median milliseconds of {rounds} turns.")
    write(arguments.json, figures, env, rows)
    return 0


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians per size, and ratios to the plain copy."""
    lines: list[tuple[str, ...]] = [
        ("size", *rows[0]["median_ms"], *(f"{of} / {over}" for of, over in RATIOS.values()))
    ]
    for row in rows:
        median_ms = row["median_ms"]
        taken = (f"{milliseconds:.3f}" for milliseconds in median_ms.values())
        lines.append((row["size"], *taken, *(f"{ratio:.2f}" for ratio in ratios(row["size"], median_ms).values())))
    return table(lines)
