"""A deadline and a circuit breaker around calls that may block for long and cannot be cancelled.

Calls run on a few threads of their own. A call past its deadline goes on there, and what it may still touch is handed
back only when it ends (`on_failure`). After some failures in a row the breaker opens: callers fail at once while a
probe, on its own thread, asks again and again until it succeeds. So callers never wait for a recovery.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar, cast

from store.errors import StoreError, StoreUnavailableError

log = logging.getLogger(__name__)
T = TypeVar("T")
State = Literal["up", "down"]

_LONGEST_PAUSE_S = 60.0
"""Between probes that are refused."""


def _nothing() -> None: ...


class _Call(Generic[T]):
    """One call on its way: `begun`, `late` and the queue change under the guard's lock only."""

    __slots__ = ("begun", "done", "error", "fn", "late", "on_failure", "result")

    def __init__(self, fn: Callable[[], T], on_failure: Callable[[], None]) -> None:
        self.fn = fn
        self.on_failure = on_failure
        self.done = threading.Event()
        self.begun = False
        self.late = False
        self.result: T | None = None
        self.error: BaseException | None = None


class Guard:
    """Thread-safe. `state` is what the breaker says; `late_calls` and `openings` only grow."""

    def __init__(
        self,
        name: str,
        probe: Callable[[], object],
        *,
        timeout_s: float,
        threads: int = 4,
        failures_to_open: int = 2,
        probe_after_s: float = 1.0,
        is_open: bool = False,
    ) -> None:
        """
        Args:
            name: of the guarded thing, for messages and thread names.
            probe: asks it something; returns when it answers, raises StoreError when it does not. May block.
            timeout_s: deadline of a call that names none.
            threads: calls at one time; when all are stuck, further calls fail at once.
            failures_to_open: late or unavailable calls in a row after which the breaker opens.
            probe_after_s: pause before each probe; longer and longer ones while probes are refused.
            is_open: begin open, and probe without a pause.
        """
        self.name = name
        self.timeout_s = timeout_s
        self.openings = 0
        self.late_calls = 0
        self._probe = probe
        self._probe_after_s = probe_after_s
        self._failures_to_open = failures_to_open
        self._most = threads
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[_Call[Any]] = deque()
        self._threads = 0
        self._idle = 0
        self._stuck = 0
        self._failures = 0
        self._open = False
        self._closed = threading.Event()
        self._recovered = threading.Event()
        if is_open:
            self._open = True
            self._start_probing(first_pause_s=0.0)
        else:
            self._recovered.set()

    @property
    def state(self) -> State:
        return "down" if self._open or self._closed.is_set() else "up"

    def call(
        self,
        fn: Callable[[], T],
        *,
        timeout_s: float | None = None,
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
        call = _Call(fn, on_failure)
        try:
            self._submit(call)
        except StoreUnavailableError:
            on_failure()
            raise
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        in_time = False
        try:
            in_time = call.done.wait(limit_s)
        finally:
            in_time = in_time or self._give_up(call)
        if not in_time:
            self._failed()
            raise StoreUnavailableError(
                f"{self.name} did not answer within {limit_s:.1f} s", retry_after_s=self._probe_after_s
            )
        if isinstance(call.error, StoreUnavailableError):
            self._failed()
        elif proof:
            self._failures = 0
        if call.error is not None:
            on_failure()
            raise call.error
        return cast(T, call.result)

    def wait_until_up(self, timeout_s: float) -> bool:
        """Waits for the breaker to close."""
        return self._recovered.wait(timeout_s) and not self._closed.is_set()

    def close(self, timeout_s: float) -> bool:
        """No further calls. True when every call, late ones included, has ended within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._closed.set()
        with self._lock:
            self._wake.notify_all()
            while self._threads and (left := deadline - time.monotonic()) > 0:
                self._wake.wait(left)
            return self._threads == 0

    def _submit(self, call: _Call[Any]) -> None:
        with self._lock:
            if self._closed.is_set():
                raise StoreUnavailableError(f"{self.name}: closed")
            if self._open:
                raise StoreUnavailableError(f"{self.name} is down", retry_after_s=self._probe_after_s)
            if self._stuck >= self._most:
                raise StoreUnavailableError(f"{self.name}: all calls are stuck", retry_after_s=self._probe_after_s)
            self._queue.append(call)
            if len(self._queue) > self._idle and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=f"{self.name} call", daemon=True).start()
            self._wake.notify()

    def _give_up(self, call: _Call[Any]) -> bool:
        """Past the deadline. True when the call ended in this very moment."""
        with self._lock:
            if call.done.is_set():
                return True
            call.late = True
            if call.begun:
                self._stuck += 1
                self.late_calls += 1
                return False
            self._queue.remove(call)
        call.on_failure()
        return False

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                while not self._queue and not self._closed.is_set():
                    self._wake.wait()
                self._idle -= 1
                if not self._queue:
                    self._threads -= 1
                    self._wake.notify_all()
                    return
                call = self._queue.popleft()
                call.begun = True
            self._run(call)
            del call  # it may hold memory that others wait for

    def _run(self, call: _Call[Any]) -> None:
        try:
            call.result = call.fn()
        except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
            call.error = error
        with self._lock:
            call.done.set()
            if not call.late:
                return
            self._stuck -= 1
        log.info("%s: a call that was given up has ended (%s)", self.name, call.error or "it succeeded")
        try:
            call.on_failure()
        except StoreError as error:
            log.warning("%s: clean-up after a late call: %s", self.name, error)

    def _failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._open or self._failures < self._failures_to_open or self._closed.is_set():
                return
            self._open = True
            self._recovered.clear()
            self.openings += 1
        log.warning("%s is down: failing fast until it answers", self.name)
        self._start_probing(first_pause_s=self._probe_after_s)

    def _start_probing(self, first_pause_s: float) -> None:
        threading.Thread(
            target=self._probe_until_up, args=(first_pause_s,), name=f"{self.name} probe", daemon=True
        ).start()

    def _probe_until_up(self, pause_s: float) -> None:
        reason = ""
        while not self._closed.wait(pause_s):
            try:
                self._probe()
            except Exception as error:  # without its probe the breaker would stay open for ever
                # What is away may be back any moment; what refuses will again, and a try may cost a whole client.
                away = isinstance(error, StoreUnavailableError)
                doubled_s = min(2 * max(pause_s, self._probe_after_s), _LONGEST_PAUSE_S)
                pause_s = self._probe_after_s if away else doubled_s
                if str(error) != reason:
                    reason = str(error)
                    level, named = logging.INFO if away else logging.WARNING, isinstance(error, StoreError)
                    log.log(level, "%s is still down: %s", self.name, reason, exc_info=not named)
                continue
            with self._lock:
                self._failures = 0
                self._open = False
                self._recovered.set()
            log.info("%s is up", self.name)
            return
