"""What the arena costs beyond moving the bytes: put and get against a plain copy of the same size.

    python -m bench.arena [--output bench/results/arena.json]

Base: `numpy.copyto` between the same kinds of memory (pre-faulted shared memory on one side, private memory on the
other), rotating over as many places as the arena has. Puts run in a full arena, so each one evicts. All variants of
one size take turns within one loop, in an order drawn for every turn, each on the private buffer that was left alone
longest: noisy neighbours and warm caches meet them alike. Medians, and ratios of medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from store.arena import Arena

SIZES = {"1 MB": 1_000_000, "8.6 MB": 1196 * 3584 * 2, "19 MB": 2691 * 3584 * 2}  # 1196 and 2691 tokens of 3584 fp16
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


def main() -> None:
    """Prints a table and writes the same numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("bench/results/arena.json"))
    parser.add_argument("--rounds", type=int, default=400)
    arguments = parser.parse_args()
    results = {}
    print(f"{'':8}{'copy in':>10}{'put':>10}{'ratio':>7}{'no sum':>10}{'ratio':>7}", end="")
    print(f"{'copy out':>12}{'get':>10}{'ratio':>7}{'no sum':>10}{'ratio':>7}{'lease':>10}   (median ms)")
    for label, nbytes in SIZES.items():
        times = measure(nbytes, arguments.rounds)
        ratios = {
            "put": times["put"] / times["copy in"],
            "put, no checksum": times["put, no checksum"] / times["copy in"],
            "get": times["get"] / times["copy out"],
            "get, no checksum": times["get, no checksum"] / times["copy out"],
        }
        results[label] = {"bytes": nbytes, "median_ms": times, "ratio_to_copy": ratios}
        print(f"{label:8}{times['copy in']:10.3f}{times['put']:10.3f}{ratios['put']:7.2f}", end="")
        print(f"{times['put, no checksum']:10.3f}{ratios['put, no checksum']:7.2f}{times['copy out']:12.3f}", end="")
        print(f"{times['get']:10.3f}{ratios['get']:7.2f}{times['get, no checksum']:10.3f}", end="")
        print(f"{ratios['get, no checksum']:7.2f}{times['lease']:10.4f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record = {
        "command": "python -m bench.arena",
        "commit": commit.stdout.strip(),
        "rounds": arguments.rounds,
        "machine": {"arch": platform.machine(), "cpus": os.cpu_count(), "model": _cpu_model()},
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "results": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    main()
