"""A deadline and a circuit breaker around calls that may block for long and cannot be cancelled.

Calls run on a few threads of their own. A call past its deadline goes on there, and what it may still touch is handed
back only when it ends (`on_failure`). After some failures in a row the breaker opens: callers fail at once while a
probe, on its own thread, asks again and again until it succeeds. So callers never wait for a recovery.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from store.errors import StoreError, StoreUnavailableError

log = logging.getLogger(__name__)
T = TypeVar("T")
State = Literal["up", "down"]

_LONGEST_PAUSE_S = 60.0
"""Between probes that are refused."""


def _nothing() -> None: ...


class Guard:
    """Thread-safe. Begins open, and probes at once. `state` is what the breaker says."""

    def __init__(
        self,
        name: str,
        probe: Callable[[], object],
        *,
        threads: int = 4,
        failures_to_open: int = 2,
        probe_after_s: float = 1.0,
    ) -> None:
        """
        Args:
            name: of the guarded thing, for messages and thread names.
            probe: asks it something; returns when it answers, raises StoreError when it does not. May block.
            threads: calls at one time; when all are stuck, further calls fail at once.
            failures_to_open: late or unavailable calls in a row after which the breaker opens.
            probe_after_s: pause before each probe; longer and longer ones while probes are refused.
        """
        self.name = name
        self._probe, self._probe_after_s, self._failures_to_open = probe, probe_after_s, failures_to_open
        self._lock = threading.Lock()  # guards the counts
        self._failures = self._stuck = 0
        self._up, self._closed = threading.Event(), threading.Event()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [self._start(self._work, "call") for _ in range(threads)]
        self._start(lambda: self._probe_until_up(0.0), "probe")

    @property
    def state(self) -> State:
        return "up" if self._up.is_set() and not self._closed.is_set() else "down"

    def call(
        self,
        fn: Callable[[], T],
        *,
        timeout_s: float,
        on_failure: Callable[[], None] = _nothing,
        proof: bool = True,
    ) -> T:
        """`fn()`, on a thread of this guard.

        When this raises, whatever it raises, `on_failure` runs exactly once, as soon as `fn` runs no more: at once, or,
        when it was given up, whenever it ends. Memory that `fn` touches is handed back there and nowhere else.
        `proof`: an answer shows that the whole thing works, so earlier failures do not count any more.

        Raises:
            StoreUnavailableError: past the deadline, the breaker is open, or every thread is stuck.
        """
        call: Future[T] = Future()
        try:
            refusal = self._refusal()
            if not refusal:
                self._calls.put((call, fn))
                wait([call], timeout_s)
            if not call.done():
                raise StoreUnavailableError(f"{self.name} {refusal or f'did not answer within {timeout_s:.1f} s'}")
            if proof and not isinstance(call.exception(), StoreUnavailableError):
                self._failures = 0
            return call.result()
        except BaseException as error:
            if isinstance(error, StoreUnavailableError):
                self._failed()
            if call.cancel() or call.done():  # it never began, or has ended
                on_failure()
            else:
                self._give_up(call, on_failure)
            raise

    def wait_until_up(self, timeout_s: float) -> bool:
        """Waits for the breaker to close."""
        return self._up.wait(timeout_s) and not self._closed.is_set()

    def close(self, timeout_s: float) -> bool:
        """No further calls. True when every call, late ones included, has ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._closed.set()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self, what: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=what, name=f"{self.name} {name}", daemon=True)
        thread.start()
        return thread

    def _refusal(self) -> str:
        """Why a call has no prospect, or ""."""
        if self.state == "down":
            return "is closed" if self._closed.is_set() else "is down"
        return "has all calls stuck" if self._stuck >= len(self._threads) else ""

    def _give_up(self, call: Future[Any], on_failure: Callable[[], None]) -> None:
        with self._lock:
            self._stuck += 1

        def ended(call: Future[Any]) -> None:
            with self._lock:
                self._stuck -= 1
            log.info("%s: a call that was given up has ended (%s)", self.name, call.exception() or "it succeeded")
            on_failure()

        call.add_done_callback(ended)

    def _work(self) -> None:
        while (job := self._calls.get()) is not None:
            call, fn = job
            if call.set_running_or_notify_cancel():
                try:
                    call.set_result(fn())
                except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
                    call.set_exception(error)
            del job, call, fn  # they may hold memory that others wait for

    def _failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures < self._failures_to_open or self.state == "down":
                return
            self._up.clear()
        log.warning("%s is down: failing fast until it answers", self.name)
        self._start(lambda: self._probe_until_up(self._probe_after_s), "probe")

    def _probe_until_up(self, pause_s: float) -> None:
        reason = ""
        while not self._closed.wait(pause_s):
            try:
                self._probe()
            except Exception as error:  # without its probe the breaker would stay open for ever
                # What is away may be back any moment; what refuses will again, and a try may cost a whole client.
                away = isinstance(error, StoreUnavailableError)
                pause_s = (
                    min(2 * max(pause_s, self._probe_after_s), _LONGEST_PAUSE_S) if not away else self._probe_after_s
                )
                if str(error) != reason:
                    reason = str(error)
                    level, named = logging.INFO if away else logging.WARNING, isinstance(error, StoreError)
                    log.log(level, "%s is still down: %s", self.name, reason, exc_info=not named)
                continue
            self._failures = 0
            self._up.set()
            log.info("%s is up", self.name)
            return
