"""Load on simulated stages behind a proxy in a process of its own: text, pictures, and clients that leave midway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.epd_serve.sim.served import data_url
from tests.waiting import PATIENCE_S, wait_for

CHAT = "/v1/chat/completions"
TEXT = {"model": "epd-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def picture(width: int) -> dict[str, Any]:
    """A chat about a picture that no other width shares a feature with."""
    part = {"type": "image_url", "image_url": {"url": data_url("PNG", width, 56)}}
    return {**TEXT, "messages": [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]}


class Load:
    """What became of requests that were sent all the while.

    Attributes:
        errors: answers that were none. broken: connections that ended without one.
    """

    def __init__(self) -> None:
        self.served = 0
        self.left = 0
        self.errors: list[str] = []
        self.broken: list[str] = []


@contextmanager
def load(url: str, clients: int = 4, *, leavers: int = 0) -> Iterator[Load]:
    """Requests one after the other from each client, every other one with text; leavers go in the middle of theirs."""
    found, over = Load(), threading.Event()

    def client(number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            body = TEXT if number % 2 else picture(56 + 4 * (count * (clients + leavers) + number))
            try:
                with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
                    if number < clients:
                        _stay(http, body, found)
                    else:
                        _leave(http, {**body, "stream": True, "max_tokens": 400}, count)
                        found.left += 1
            except httpx.TransportError as error:
                found.broken.append(repr(error))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients + leavers)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads), "a request hangs"


def _stay(http: httpx.Client, body: dict[str, Any], found: Load) -> None:
    answer = http.post(CHAT, json=body)
    if answer.status_code == 200:
        found.served += 1
    else:
        found.errors.append(answer.text)


def _leave(http: httpx.Client, body: dict[str, Any], events: int) -> None:
    """After none, one or two events."""
    with http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(events % 3):
            next(lines, "")


def more(found: Load, count: int = 20) -> None:
    """Wait for so many further answers."""
    least = found.served + count
    wait_for(lambda: found.served >= least, f"{count} more answers")


def in_flight(url: str, headers: dict[str, str] | None = None) -> dict[str, int]:
    """How many requests each instance has, if any."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        views = http.get("/instances", headers=headers).json()["instances"]
    counts = {str(one["id"]): sum(one["in_flight"].values()) for one in views}
    return {name: count for name, count in counts.items() if count}
