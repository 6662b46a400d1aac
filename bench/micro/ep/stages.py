"""The two processes of a link of `epd-bench transfer ep`: a stage's own producer, and a stage's own consumer.

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
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from epd_serve import wire
from epd_serve.demo.features import random_feature
from epd_serve.engine.ec.consumer import FeatureConsumer
from epd_serve.engine.ec.producer import FeatureProducer
from epd_serve.roles import Role
from epd_serve.sockets import Socket, open_socket, readable
from epd_serve.wake import idle_waiter
from epd_serve.wiring import StageWiring
from store.arena.lease import Lease

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


def prefill(pipe: Connection, wiring: StageWiring, publisher: str) -> None:
    """Orders: `admit` a request for a feature, at a moment or so long after it was announced (`synchronous`)."""
    consumer = FeatureConsumer(wiring)
    announced = open_socket(zmq.SUB)  # ours, not the consumer's: what tells a synchronous P that E has finished
    announced.setsockopt(zmq.SUBSCRIBE, b"")
    announced.connect(publisher)
    pipe.send(True)
    for order in iter(pipe.recv, None):
        _admit(consumer, announced, order, pipe)
    consumer.close()


def _admit(consumer: FeatureConsumer, announced: Socket, order: Mapping[str, Any], pipe: Connection) -> None:
    """Admit a request for the feature, and once more with the feature local.

    Answers twice: when it is armed, and how it went; `heard=False` when nobody announced the feature.
    """
    key, at, again = order["admit"], order["at"], f"{order['admit']} again"
    if order["synchronous"]:
        pipe.send(True)
        announced_at = _announced_at(announced, key, order["limit_s"], pooled=order["pooled"])
        if announced_at is None:
            pipe.send({"heard": False})
            return
        at += announced_at
    settled = _asked(consumer, key, key, at)
    if not order["synchronous"]:
        pipe.send(True)
    admitted = _admitted(consumer, key, key, settled=settled)
    # As long a wait as before: a thread that slept long wakes later, and that is not the transfer's doing.
    local_at = time.monotonic() + max(LOCAL_AFTER_S, order["scheduling_s"])
    local = _admitted(consumer, again, key, settled=_asked(consumer, again, key, local_at))
    lease = consumer.pinned(key)
    assert lease is None or isinstance(lease, Lease), "the host path is what is measured here"
    begun = time.monotonic()
    if lease is not None:
        np.frombuffer(lease.view(), np.uint8).copy()  # as the worker loads it, whatever the mode
    load_s = time.monotonic() - begun
    for request in (key, again):
        consumer.ended(request)
    consumer.release([key, again])
    found = {"heard": True, "local": lease is not None, "admitted": admitted}
    pipe.send({**found, "local_s": local - local_at, "load_s": load_s})


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


def _announced_at(announced: Socket, key: str, limit_s: float, *, pooled: bool) -> float | None:
    """When the feature's announcement arrived; None when it did not in time.

    `pooled`: the announcement that says that other hosts can fetch it. E announces a feature of its arena before that.
    """
    end = time.monotonic() + limit_s
    while readable(announced, max(0.0, end - time.monotonic())):
        message = wire.announcements.decode(announced.recv())
        if isinstance(message, wire.FeatureReady) and message.key == key and (message.pooled or not pooled):
            return time.monotonic()
    return None
