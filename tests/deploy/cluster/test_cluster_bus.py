"""The event bus, with real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from deploy.cluster.bus import EventBus
from deploy.host.ports import free_ports
from epd_serve import wire
from epd_serve.errors import ConfigError
from tests.waiting import PATIENCE_S

Socket = zmq.Socket[bytes]


@contextmanager
def connected(kind: int, *addresses: str) -> Iterator[Socket]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        for address in addresses:
            socket.connect(address)
        yield socket


def addresses() -> tuple[str, str]:
    publish, listen = free_ports(2, "127.0.0.2")
    return f"tcp://127.0.0.2:{publish}", f"tcp://127.0.0.2:{listen}"


def until_heard(publisher: Socket, listeners: list[Socket], message: wire.Announcement) -> None:
    """Announce until every listener has it: subscriptions take a moment to arrive."""
    waiting, deadline = set(range(len(listeners))), time.monotonic() + PATIENCE_S
    while waiting:
        assert time.monotonic() < deadline, f"listeners {waiting} hear nothing"
        publisher.send(wire.encode(message))
        for index in list(waiting):
            while listeners[index].poll(20):
                if wire.announcements.decode(listeners[index].recv()) == message:
                    waiting.discard(index)


def test_what_any_stage_announces_every_listener_hears() -> None:
    publish, listen = addresses()
    ready, missing = wire.FeatureReady("k", 8, "life", host="a"), wire.FeatureMissing("r", ["k"], "lost")
    with EventBus(publish, listen), connected(zmq.SUB, listen) as one, connected(zmq.SUB, listen) as two:
        with connected(zmq.PUB, publish) as encoder, connected(zmq.PUB, publish) as consumer:
            until_heard(encoder, [one, two], ready)
            until_heard(consumer, [one, two], missing)


def test_a_bus_that_comes_back_is_used_again_without_a_word_to_anybody() -> None:
    publish, listen = addresses()
    with connected(zmq.SUB, listen) as listener, connected(zmq.PUB, publish) as encoder:
        for number in range(2):
            with EventBus(publish, listen):
                until_heard(encoder, [listener], wire.FeatureFailed("k", f"life {number}"))


def test_a_port_in_use_is_a_config_error_and_nothing_stays_bound() -> None:
    publish, listen = addresses()
    with EventBus(publish, listen):
        with pytest.raises(ConfigError, match="--cluster-port"):
            EventBus(publish, listen)
        (free,) = free_ports(1, "127.0.0.2")
        with pytest.raises(ConfigError, match="--cluster-port"):
            EventBus(f"tcp://127.0.0.2:{free}", listen)
        EventBus(f"tcp://127.0.0.2:{free}", f"tcp://127.0.0.3:{free}").close()


def test_forwarding_that_fails_is_told_once_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, failures = zmq.proxy, [zmq.ZMQError(zmq.EFSM), zmq.ZMQError(zmq.EAGAIN)]

    def breaks(*sockets: Socket) -> None:
        if failures:
            raise failures.pop()
        forward(*sockets)

    monkeypatch.setattr("deploy.cluster.bus.zmq.proxy", breaks)
    publish, listen = addresses()
    with EventBus(publish, listen) as bus, connected(zmq.PUB, publish) as stage, connected(zmq.SUB, listen) as listener:
        until_heard(stage, [listener], wire.FeatureReady("k", 1, "E0-life1"))
        with pytest.raises(zmq.ZMQError):
            bus.raise_failure()
        bus.raise_failure()
