"""Waking threads: a line from the scheduler thread to a socket thread, and what an idle scheduler sleeps on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import zmq

from epd_serve.sockets import open_socket, readable

_IDLE_WAIT_S = 0.002
_numbers = itertools.count()


class WakeLine:
    """Lets threads wake one that sleeps in a ZMQ poll. `ring` belongs to the callers, the rest to the sleeper."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a ZMQ socket is one thread's at a time
        self._caller, self.listener = open_socket(zmq.PAIR), open_socket(zmq.PAIR)
        name = f"inproc://epd-wake-{next(_numbers)}"  # ZMQ frees the name of a closed socket some time later
        self.listener.bind(name)
        self._caller.connect(name)

    def ring(self) -> None:
        try:
            with self._lock:
                self._caller.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            return  # the line is full of unanswered rings: the listener will wake anyway

    def answer(self) -> None:
        """Consume all rings at hand."""
        while readable(self.listener):
            self.listener.recv()


class IdleWaiter:
    """What those of a scheduler with nothing to run sleep on, for at most `_IDLE_WAIT_S` each.

    vLLM steps about every millisecond while a request waits for a connector; on CPU that burns the core that the other
    stage computes on. Our threads wake it when something changed, so the sleep costs no latency. A scheduler may have
    two who wait, for features and for KV, one after the other in one step: a wake is there for both.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wakes = 0

    def wake(self) -> None:
        """Ends all sleeps; one that begins later returns at once, once."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def sleeper(self) -> Callable[[], None]:
        """Returns a sleep for one who waits, which ends at once where `wake` was called since its last one."""
        seen = self._wakes

        def wait() -> None:
            nonlocal seen
            with self._changed:
                self._changed.wait_for(lambda: self._wakes != seen, _IDLE_WAIT_S)
                seen = self._wakes

        return wait


idle_waiter = IdleWaiter()  # one scheduler per process
