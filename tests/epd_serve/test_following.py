"""A socket that hears others follows them as they come and go."""

from __future__ import annotations

from pathlib import Path

import zmq

from epd_serve.sockets import Following, open_socket
from tests.waiting import wait_for


def subscriptions(publisher: zmq.Socket[bytes]) -> list[bytes]:
    """What has come of late: 1 for one that subscribes, 0 for one that has gone."""
    found = []
    while publisher.poll(0):
        found.append(publisher.recv())
    return found


def test_one_that_comes_is_heard_and_from_one_that_goes_it_disconnects(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("E0", "E1")]
    context = zmq.Context.instance()
    with context.socket(zmq.SUB) as ear, context.socket(zmq.XPUB) as first, context.socket(zmq.XPUB) as second:
        for publisher, address in zip((first, second), addresses, strict=True):
            publisher.setsockopt(zmq.XPUB_VERBOSER, 1)
            publisher.bind(address)
        ear.setsockopt(zmq.SUBSCRIBE, b"")
        following = Following(ear)
        following.follow(addresses[:1])
        wait_for(lambda: subscriptions(first) == [b"\x01"])
        following.follow(addresses)
        wait_for(lambda: subscriptions(second) == [b"\x01"])
        following.follow(addresses[1:])
        wait_for(lambda: (ear.poll(0), subscriptions(first))[1] == [b"\x00"])  # a socket that nobody uses goes nowhere
        second.send(b"news")
        assert ear.recv() == b"news"
        assert subscriptions(second) == [], "it stayed connected all the time"


def test_one_that_is_not_there_yet_may_be_followed_and_left(tmp_path: Path) -> None:
    ear = open_socket(zmq.SUB)
    try:
        following = Following(ear)
        following.follow([f"ipc://{tmp_path}/nobody"])
        following.follow([])
        following.follow([])
    finally:
        ear.close()
