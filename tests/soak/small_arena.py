"""`python -m tests.soak.small_arena`: an arena of 64 MiB that all features have to pass, under load.

A stage's own producer and a stage's own consumer, in processes of their own; emulated is the compute only: E takes
`ENCODE_S` for an image, P `PREFILL_S`, one request after the other. As many requests as there are clients are called
at one time, each ahead of its encoding, with one to three images of 6 MiB: E runs ahead of P and has to wait for room.
What P has to recompute costs it `RECOMPUTE_S`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.micro.measurement import Goal
from bench.micro.rows import table_of
from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.engine.ec.step import FeatureStep, NeededItem
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.wake import idle_waiter
from epd_serve.wiring import StageWiring
from store.arena import Arena
from tests.soak.harness import Result, Soak

ARENA_BYTES, FEATURE_BYTES = 64 << 20, 6 << 20
CLIENTS = (8, 24)
ENCODE_S, PREFILL_S, RECOMPUTE_S, RUNNING = 0.008, 0.030, 0.024, 2
METADATA = {"image_grid_thw": [[1, 4, 4]]}
LIMIT_S = 300.0
SPAWN = multiprocessing.get_context("spawn")


def measure(arguments: argparse.Namespace) -> Result:
    rows = [passed(clients, requests=100 if arguments.quick else 400) for clients in CLIENTS]
    figures = {
        "recomputed_of_100_features": max(100 * row["recomputed"] / row["features"] for row in rows),
        "seconds_over_prefill": max(row["seconds"] / row["prefill_s"] for row in rows),
    }
    columns = {name: f"{{{name}}}" for name in ("clients", "features", "recomputed", "evictions", "seconds")}
    return figures, rows, table_of(rows, columns)


def passed(clients: int, requests: int) -> dict[str, Any]:
    """One row."""
    with tempfile.TemporaryDirectory(prefix="epd-") as folder:
        path = Path(f"/dev/shm/epd-soak-{os.getpid()}-arena")
        arena = Arena.create(path, ARENA_BYTES)
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=encode, args=(theirs, _wiring(folder, path, Role.E)), daemon=True)
        process.start()
        consumer = FeatureConsumer(_wiring(folder, path, Role.P))
        try:
            ours.recv()
            return {"clients": clients, **_Prefill(consumer, ours, clients, requests).run(), **_stats(arena)}
        finally:
            process.kill()
            process.join()
            consumer.close()
            arena.close()
            Arena.unlink(path)


def _stats(arena: Arena) -> dict[str, int]:
    return {"evictions": arena.stats().evictions}


def _wiring(folder: str, arena: Path, role: Role) -> StageWiring:
    peers, events = Path(folder) / "peers.json", f"ipc://{folder}/E0"
    write_peers(peers, [Peer("E0", Role.E, events=events)])
    publish = events if role is Role.E else ""
    return StageWiring(f"{role.value}0", role, "i", arena=str(arena), arena_id="h", peers=str(peers), publish=publish)


def encode(pipe: Connection, wiring: StageWiring) -> None:
    """E: a request's images when it has heard of it, first come, first served, until it is killed."""
    producer, cache = FeatureProducer(wiring), dict[str, torch.Tensor]()
    queue: deque[str] = deque()
    pipe.send(None)
    while True:
        while pipe.poll(0 if queue else None):
            keys = pipe.recv()
            queue.extend(keys)
            producer.step(FeatureStep(needed=[NeededItem(key, METADATA) for key in keys], held=list(queue)), cache)
        key = queue.popleft()
        time.sleep(ENCODE_S)
        cache[key] = torch.ones(FEATURE_BYTES, dtype=torch.uint8)
        producer.save(cache, key)
        del cache[key]
        producer.step(FeatureStep(held=list(queue)), cache)


@dataclass
class _Prefill:
    """P, as vLLM's scheduler asks it."""

    consumer: FeatureConsumer
    encoder: Connection
    clients: int
    requests: int
    waiting: dict[str, list[str]] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)  # until when

    def run(self) -> dict[str, Any]:
        chance = random.Random(1)
        images = [chance.randint(1, 3) for _ in range(self.requests)]
        todo = deque((f"r{at}", [f"{at}.{number}" for number in range(count)]) for at, count in enumerate(images))
        self._call(todo, self.clients)
        begun = time.monotonic()
        while self.waiting or self.running:
            over = [request for request, until in self.running.items() if until <= time.monotonic()]
            self.consumer.release(over)
            for request in over:
                del self.running[request]
            self._call(todo, len(over))
            self._admit()
            idle_waiter.wait(0.002 if self.running else 0.02)
            assert time.monotonic() < begun + LIMIT_S, f"{len(self.waiting)} wait, {len(self.running)} run"
        counters = self.consumer.features.counters
        recomputed = sum(count for name, count in counters.items() if name.startswith("recomputed."))
        seconds = round(time.monotonic() - begun, 2)
        return {
            "features": sum(images), "recomputed": recomputed, "seconds": seconds, "prefill_s": PREFILL_S * sum(images)
        }  # fmt: skip

    def _call(self, todo: deque[tuple[str, list[str]]], requests: int) -> None:
        for _ in range(min(requests, len(todo))):
            request, keys = todo.popleft()
            self.waiting[request] = keys
            self.encoder.send(keys)
            self.consumer.look_for(keys)

    def _admit(self) -> None:
        for request, keys in list(self.waiting.items()):
            if len(self.running) < RUNNING and self.consumer.settled(request, keys) is not None:
                lost = sum(self.consumer.pinned(key) is None for key in keys)
                begins = max([time.monotonic(), *self.running.values()])
                self.running[request] = begins + PREFILL_S * len(keys) + RECOMPUTE_S * lost
                del self.waiting[request]


SOAK = Soak(
    "small_arena",
    "what P recomputes, and how fast features pass, where the arena is too small for what is in flight",
    measure,
    (Goal("recomputed_of_100_features", "<=", 5.0, "E waits for room instead"),),
    (Goal("seconds_over_prefill", "<=", 1.3, "room comes back at P's pace"),),
    kind="E's producer and P's consumer, compute emulated",
)

if __name__ == "__main__":
    raise SystemExit(SOAK.main())
