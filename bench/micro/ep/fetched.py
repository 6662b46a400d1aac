"""Of `epd-bench transfer ep`: how many bytes of features hosts fetch, over how many their requests need.

Two encoders, four P and four D, each with an arena of its own as on ten hosts, in this process: the stages' own
producers and consumers, their threads, tables, sockets and arenas. The second tier is a dict that counts what leaves
it, the requests are called as the proxy calls them: most ahead of the end of their encoding, some when it has ended. A
byte is needed once by the P that computes its request.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bench.micro.measurement import Goal, Row
from bench.served import scratch
from epd_serve.demo.features import random_feature
from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.engine.ec.step import FeatureStep, NeededItem
from epd_serve.errors import StageError
from epd_serve.peers import Peer, write_peers
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from store.arena import Arena, Lease
from store.feature_pool import FeaturePool

LAYOUT = (Role.E,) * 2 + (Role.P,) * 4 + (Role.D,) * 4
TOKENS, HIDDEN = 64, 256
REQUESTS = 24
LATE_EVERY = 5
"""One in so many requests is called when it is encoded."""
METADATA = {"image_grid_thw": [[1, 16, 16]]}
GOALS = (Goal("fetched_over_needed", "<=", 1.1, "4 where every P fetches all that is announced"),)
LIMIT_S, LOOK_S = 30.0, 0.001


class SecondTier:
    """Features by key, in memory; `fetched` counts the bytes that left it."""

    def __init__(self) -> None:
        self.features: dict[str, tuple[bytes, tuple[int, ...], str]] = {}
        self.lock = threading.Lock()
        self.fetched = 0


class HostPool(FeaturePool):
    """The store as one host sees it: its arena, and that second tier."""

    def __init__(self, arena: Arena, tier: SecondTier) -> None:
        super().__init__(arena)
        self._tier = tier

    @property
    def state(self) -> Literal["up"]:
        return "up"

    def publish(self, key: str) -> bool:
        lease = self.arena.lease(key)
        if lease is not None:
            with lease:
                self._tier.features[key] = (bytes(lease.view()), lease.meta.shape, lease.meta.dtype)
        return lease is not None

    def fetch(self, key: str) -> Lease | None:
        lease = self.arena.lease(key)
        if lease is not None or key not in self._tier.features:
            return lease
        data, shape, dtype = self._tier.features[key]
        with self._tier.lock:
            self._tier.fetched += len(data)
        self.arena.put(key, data, shape=shape, dtype=dtype)
        return self.arena.lease(key)


def fetched_and_needed(metadata: Mapping[str, Any] = METADATA) -> Row:
    """One row with `fetched_bytes` and `needed_bytes`.

    Args:
        metadata: of the items. Without any no request is called before its items are encoded.

    Raises:
        StageError: a feature did not arrive.
    """
    tier = SecondTier()
    with scratch() as folder, contextlib.ExitStack() as stack:
        stages = [_stage(stack, folder, tier, role, number) for number, role in enumerate(LAYOUT)]
        encoders = [stage for stage in stages if isinstance(stage, FeatureProducer)]
        consumers = [stage for stage in stages if isinstance(stage, FeatureConsumer)]
        prefills = consumers[: LAYOUT.count(Role.P)]
        _all_hear(encoders, consumers, "first")
        needed = 0
        for number in range(REQUESTS):
            encoder, prefill = encoders[number % len(encoders)], prefills[number % len(prefills)]
            key = f"image {number}"
            encoder.step(FeatureStep(needed=[NeededItem(key, dict(metadata))], held=[key]), {})
            ahead = bool(metadata) and number % LATE_EVERY > 0
            if ahead:
                prefill.look_for([key])
            encoder.save({key: random_feature(TOKENS, HIDDEN, number)}, key)
            if not ahead:
                _wait(partial(tier.features.__contains__, key), f"{key} to be published")
                prefill.look_for([key])
            needed += _admitted(prefill, f"request {number}", key)
        _all_hear(encoders, consumers, "last")  # and what was announced before
    return {"fetched_bytes": tier.fetched, "needed_bytes": needed}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """One row."""
    yield fetched_and_needed()


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """The figure of that name, where a row says it."""
    found = [row["fetched_bytes"] / row["needed_bytes"] for row in rows if "needed_bytes" in row]
    return {"fetched_over_needed": found[-1]} if found else {}


def _stage(
    stack: contextlib.ExitStack, folder: Path, tier: SecondTier, role: Role, number: int
) -> FeatureProducer | FeatureConsumer:
    """One instance, on a host of its own."""
    name, path, peers = f"{role}{number}", f"/dev/shm/epd-bench-{os.getpid()}-host-{number}", folder / "peers.json"
    stack.callback(Arena.unlink, path)
    Arena.create(path, REQUESTS * TOKENS * HIDDEN * 4, slots=2 * REQUESTS, prefault=False).close()
    events = {f"{role}{number}": f"ipc://{folder}/{number}" for number, role in enumerate(LAYOUT) if role is Role.E}
    write_peers(peers, [Peer(encoder, Role.E, events=address) for encoder, address in events.items()])
    wiring = StageWiring(name, role, "bench", arena=path, arena_id=path, peers=str(peers), publish=events.get(name, ""))
    pool = HostPool(Arena.attach(path), tier)
    stage = FeatureProducer(wiring, pool=pool) if role is Role.E else FeatureConsumer(wiring, pool)
    stack.callback(stage.close)
    return stage


def _all_hear(encoders: list[FeatureProducer], consumers: list[FeatureConsumer], word: str) -> None:
    """Until all consumers have heard a word of each encoder: what was said before a subscription is lost."""
    for number, encoder in enumerate(encoders):
        key = f"{word} of {number}"

        def heard(encoder: FeatureProducer = encoder, key: str = key) -> bool:
            encoder.step(FeatureStep(needed=[NeededItem(key, dict(METADATA))]), {})
            return all(_expects(consumer, key) for consumer in consumers)

        _wait(heard, f"all to hear the {key}")


def _expects(consumer: FeatureConsumer, key: str) -> bool:
    with consumer.features.lock:
        return consumer.features.makes(key, time.monotonic())


def _admitted(prefill: FeatureConsumer, request: str, key: str) -> int:
    """The request is computed. Returns the bytes of its feature."""
    _wait(lambda: prefill.settled(request, [key]), f"{request} to be admitted")
    lease = prefill.pinned(key)
    if lease is None:
        raise StageError(f"{key} did not arrive", stage="P")
    nbytes = int(lease.meta.nbytes)
    prefill.release([request])
    return nbytes


def _wait(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise StageError(f"waited {LIMIT_S:g} s for {what}", stage="P")
        time.sleep(LOOK_S)
