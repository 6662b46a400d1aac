"""From the arena to the second tier: what other hosts can reach. One thread, because it is the network's turn.

A feature that cannot be published is tried again for a while. From its first failure on it counts as pending no more:
consumers on other hosts then recompute at their deadline instead of waiting for a network that is gone.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from store.errors import StoreError

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_GIVE_UP_S = 30.0
_MAX_WAITING = 1024


class Tell(Protocol):
    """What became of a key. `reason`: it failed. `nbytes` > 0: it is readable, on other hosts too if `pooled`."""

    def __call__(self, key: str, event: str, nbytes: int = 0, *, pooled: bool = False, reason: str = "") -> None: ...


@dataclass(order=True)
class _Task:
    due: float
    key: str = field(compare=False)
    nbytes: int = field(compare=False)
    give_up: float = field(compare=False)
    failed: bool = field(default=False, compare=False)


class SecondTierPublisher:
    """Owns the publishing thread.

    Args:
        publish: copies a feature of the arena to the second tier; True when it is there.
    """

    def __init__(self, publish: Callable[[str], bool], tell: Tell) -> None:
        self._publish, self._tell = publish, tell
        self._tasks: list[_Task] = []  # a heap, by due time
        self._current: str | None = None
        self._turn = threading.Condition()  # guards the above and _closing
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="epd-feature-publisher", daemon=True)
        self._thread.start()

    def submit(self, key: str, nbytes: int) -> None:
        """The arena has it: publish it when its turn comes."""
        now = time.monotonic()
        with self._turn:
            if len(self._tasks) >= _MAX_WAITING:
                logger.warning("feature %s is not published: %d wait for the second tier", key, _MAX_WAITING)
                return
            if any(task.key == key for task in self._tasks):
                return
            heapq.heappush(self._tasks, _Task(now, key, nbytes, now + _GIVE_UP_S))
            self._turn.notify()

    def pending(self) -> list[str]:
        """Keys that will be in the second tier soon, as far as is known."""
        with self._turn:
            waiting = [task.key for task in self._tasks if not task.failed]
            return waiting if self._current is None else [self._current, *waiting]

    def close(self) -> None:
        with self._turn:
            self._closing = True
            self._turn.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                retry = self._attempt(task)
            except Exception:  # the thread goes on: the next feature may fare better
                logger.exception("feature %s is not in the second tier", task.key)
                retry = False
            with self._turn:
                self._current = None
                if retry:
                    heapq.heappush(self._tasks, task)

    def _next(self) -> _Task | None:
        with self._turn:
            while not self._closing:
                now = time.monotonic()
                if self._tasks and self._tasks[0].due <= now:
                    task = heapq.heappop(self._tasks)
                    self._current = None if task.failed else task.key
                    return task
                self._turn.wait(timeout=self._tasks[0].due - now if self._tasks else 1.0)
        return None

    def _attempt(self, task: _Task) -> bool:
        """True: to be tried again."""
        try:
            there = self._publish(task.key)
        except StoreError as error:
            logger.warning("feature %s is not in the second tier: %s", task.key, error)
        else:
            self._tell(task.key, "published" if there else "publish_failed", task.nbytes if there else 0, pooled=there)
            return False  # not there: the arena has evicted it meanwhile
        self._tell(task.key, "publish_failed")
        task.due, task.failed = time.monotonic() + _RETRY_S, True
        return task.due < task.give_up
