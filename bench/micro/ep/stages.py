"""The two processes of a link (`bench/micro/ep/links.py`): a stage's own producer, and a stage's own consumer.

E's features are random and lie ready, no vision tower runs; what happens from the moment the tower would be done is the
stage's own code: writer thread, put into the store, announcement on its socket.

P is asked as vLLM's scheduler asks it. Emulated is the compute only. While P computes another prefill, its engine
thread waits for the device and asks nothing: here it sleeps until the given time, as a thread does that waits for an
NPU (on CPU stages the compute would also take cores away from the listener thread; that is not in these figures). After
it, each turn of the loop is a scheduler step without tokens: ask the consumer, then sleep on the bell that its listener
rings, as the connector does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from epd_serve.demo.features import random_feature
from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.roles import Role
from epd_serve.wake import idle_waiter
from epd_serve.wiring import StageWiring
from store.arena import Lease

LIMIT_S = 30.0
LOOK_S = 0.25  # as the engine without a ring
LOCAL_AFTER_S = 0.005
"""Where there is no scheduling latency: so long a wait until a request whose feature is local."""
KEPT = 4
"""Features that the stand-in for vLLM's encoder cache holds."""


def main(pipe: Connection, wiring: StageWiring, *given: Any) -> None:
    """One of the two. Answers True when it is ready."""
    (encoder if wiring.role is Role.E else prefill)(pipe, wiring, *given)


def encoder(pipe: Connection, wiring: StageWiring, sizes: Sequence[int], hidden: int) -> None:
    """Orders: save features one after the other, `every_s`. Answers: CLOCK_MONOTONIC seconds of the last."""
    producer = FeatureProducer(wiring)
    features = {tokens: random_feature(tokens, hidden) for tokens in sizes}
    cache: dict[str, Any] = {}  # as vLLM's: one dict for the life of the worker
    pipe.send(True)
    for keys, tokens, every_s in iter(pipe.recv, None):
        for key in keys:
            cache[key] = features[tokens]
            while len(cache) > KEPT:
                del cache[next(iter(cache))]
            encoded = time.monotonic()
            producer.save(cache, key)
            time.sleep(every_s)
        pipe.send(encoded)
    producer.close()


def prefill(pipe: Connection, wiring: StageWiring) -> None:
    """Orders: admit a request for a feature at a moment, and once more with the feature local. Answers twice: when P
    has asked for it, and how it went."""
    consumer = FeatureConsumer(wiring)
    pipe.send(True)
    for key, at, scheduling_s in iter(pipe.recv, None):
        again = f"{key} again"
        settled = _asked(consumer, key, key, at)
        pipe.send(True)
        admitted = _admitted(consumer, key, key, settled=settled)
        # As long a wait as before: a thread that slept long wakes later, and that is not the transfer's doing.
        local_at = time.monotonic() + max(LOCAL_AFTER_S, scheduling_s)
        local = _admitted(consumer, again, key, settled=_asked(consumer, again, key, local_at))
        lease = consumer.pinned(key)
        assert lease is None or isinstance(lease, Lease), "the host path is what is measured here"
        begun = time.monotonic()
        if lease is not None:
            np.frombuffer(lease.view(), np.uint8).copy()  # as the worker loads it
        load_s = time.monotonic() - begun
        consumer.release([key, again])
        pipe.send({"local": lease is not None, "admitted": admitted, "local_s": local - local_at, "load_s": load_s})
    consumer.close()


def _asked(consumer: FeatureConsumer, request: str, key: str, at: float) -> bool:
    """Whether the feature is there (or lost) when P, which computes until `at`, asks for the first time."""
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)
    return consumer.settled(request, [key]) is not None


def _admitted(consumer: FeatureConsumer, request: str, key: str, *, settled: bool) -> float:
    """When the request could be admitted: P asks whenever it is woken."""
    end = time.monotonic() + LIMIT_S
    while not settled and time.monotonic() < end:
        idle_waiter.wait(LOOK_S)
        settled = consumer.settled(request, [key]) is not None
    return time.monotonic()
