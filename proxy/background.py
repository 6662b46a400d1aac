"""Tasks that run as long as their process: started again when they end, counted, and shown while they are down.

Everything here that feeds the proxy without a request (announcements, health of stages, notes on shared
counters) runs under one `Background`. A message that its handler fails on is counted by its kind, logged at most
once a minute, and skipped. Work of one request is not for here: it belongs to the request's own TaskGroup.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from proxy.metrics import LabelledCounter

logger = logging.getLogger(__name__)

BACKOFF_S, BACKOFF_MAX_S = 0.1, 10.0
SETTLED_S = 2.0
"""A task that has run for so long again is no longer down, and its next failure is a first one."""
SAY_AGAIN_S = 60.0

Run = Callable[[], Coroutine[Any, Any, None]]


class Background:
    """The background tasks of one process, in its event loop.

    Attributes:
        registry: its metrics, to be registered with those of the process.
        elsewhere: what is down in the process that feeds this one.
        changed: called when `down` has changed.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.elsewhere: Mapping[str, str] = {}
        self.changed: Callable[[], None] = lambda: None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._down: dict[str, str] = {}
        self._logged_at: dict[str, float] = {}
        self._failed = LabelledCounter(
            "epd_proxy_background_failed",
            "Times that a task that has to run for ever ended, and was started again.",
            ("task",),
            registry=self.registry,
        )
        self._gauge = Gauge(
            "epd_proxy_background_down", "1 while such a task is down.", ("task",), registry=self.registry
        )
        self._broken = LabelledCounter(
            "epd_proxy_broken_messages",
            "Messages that were skipped because they did not decode or their handler failed, by kind.",
            ("kind",),
            registry=self.registry,
        )

    @property
    def down(self) -> dict[str, str]:
        """Tasks that do not run, here or where this process is fed from, and why."""
        return {**self.elsewhere, **self._down}

    def start(self, name: str, run: Run) -> None:
        """Run `run()` until `stop`, again whenever it ends: after 0.1 s, and up to 10 s while it keeps failing."""
        assert name not in self._tasks, f"{name} is started twice"
        self._gauge.labels(name).set(0)
        self._tasks[name] = asyncio.create_task(self._keep(name, run), name=name)

    async def stop(self, *names: str) -> None:
        """End these tasks, or all. Harmless for what was never started."""
        tasks = [self._tasks.pop(name) for name in names or tuple(self._tasks) if name in self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @contextmanager
    def handling(self, kind: str) -> Iterator[None]:
        """Whatever is raised within is counted, said now and then, and goes no further."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a handler fails of
            self.skipped(kind, error)

    def skipped(self, kind: str, error: Exception) -> None:
        """A message of this kind came to nothing."""
        self._broken.labels(kind).inc()
        self._say(kind, f"skipping a broken message ({kind})", error)

    async def _keep(self, name: str, run: Run) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began = loop.time()
            settling = loop.call_later(SETTLED_S, self._set_down, name, "")
            try:
                await run()
                error: BaseException = RuntimeError("it came to an end")
            except asyncio.CancelledError as cancelled:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                error = cancelled  # a future of its own was cancelled, not this task
            except Exception as failed:  # noqa: BLE001 - whatever a task fails of
                error = failed
                while isinstance(error, BaseExceptionGroup):  # a TaskGroup fails of its first
                    error = error.exceptions[0]
            finally:
                settling.cancel()
            failures = 1 if loop.time() - began >= SETTLED_S else failures + 1
            delay_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(failures - 1, 16))
            self._failed.labels(name).inc()
            self._set_down(name, f"{type(error).__name__}: {error}"[:200])
            self._say(name, f"{name} failed and starts again in {delay_s:.1f} s", error)
            await asyncio.sleep(delay_s)

    def _set_down(self, name: str, why: str) -> None:
        if why == self._down.get(name, ""):
            return
        if why:
            self._down[name] = why
        else:
            del self._down[name]
            logger.warning("%s runs again", name)
        self._gauge.labels(name).set(bool(why))
        self.changed()

    def _say(self, what: str, message: str, error: BaseException) -> None:
        now = time.monotonic()
        if now >= self._logged_at.get(what, float("-inf")) + SAY_AGAIN_S:
            self._logged_at[what] = now
            logger.error("%s; the same is not said again within %.0f s", message, SAY_AGAIN_S, exc_info=error)
