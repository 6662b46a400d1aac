"""What became of one request, told to a client that asks with `x-epd-explain: 1`: path, instances, moments.

Owns the `x-epd-*` response headers. They leave with the first byte, so what happens later is in the trace only.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from starlette.datastructures import Headers

ASK = "x-epd-explain"
MAX_STAMPS = 64
"""Stamps of one request; what is retried for minutes must not make a header that clients refuse."""
MAX_VALUE_CHARS = 2000
MAX_PREDICTIONS = 8


class Named(Protocol):
    @property
    def id(self) -> str: ...


def is_requested(headers: Headers) -> bool:
    """Whether the client wants to be told. Anything but `1`, `true`, `yes` means no."""
    return headers.get(ASK, "").strip().lower() in ("1", "true", "yes")


class Explanation:
    """Collects while a request runs; does nothing at all where nobody asked.

    Args:
        request_id: the id that the stages know the request by.
        enabled: the client asked. clock: seconds.
    """

    def __init__(self, request_id: str, *, enabled: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._enabled = enabled
        self._clock = clock
        self._begun = clock()
        self._stamps: list[str] = []
        self._facts = {"request-id": request_id}
        self._attempts = 0
        self._encoders: dict[str, None] = {}
        self._predictions: dict[str, str] = {}
        self._route: tuple[str | None, str] | None = None

    def stamp(self, name: str) -> None:
        """`name` has happened now. A name may come again when a step is repeated."""
        if self._enabled and len(self._stamps) < MAX_STAMPS:
            self._stamps.append(f"{name}={1000 * (self._clock() - self._begun):.1f}")

    def say(self, name: str, value: object) -> None:
        """A fact for the header `x-epd-<name>`; the last one counts. Lower-case words joined by `-`."""
        if self._enabled:
            self._facts[name] = str(value)

    def encoded_by(self, instance: str) -> None:
        """`instance` has encoded an item of the request."""
        if self._enabled:
            self._encoders[instance] = None

    def predicted(self, work: str, seconds: Callable[[], Iterable[tuple[Named, float]]]) -> None:
        """What the choice of an instance for `work` went by: when it would be done at each of them."""
        if self._enabled:
            shortest = heapq.nsmallest(MAX_PREDICTIONS, seconds(), key=lambda one: one[1])
            self._predictions[work] = ", ".join(f"{work}@{instance.id}={1000 * s:.1f}" for instance, s in shortest)
            self.say("predicted-ms", ", ".join(self._predictions.values()))

    def attempted(self, path: str, prefill: str | None, decode: str) -> None:
        """An attempt begins on these instances."""
        if not self._enabled:
            return
        self._attempts += 1
        self.say("attempts", self._attempts)
        self.say("path", path)
        self._route = (prefill, decode)
        self.stamp("dispatched")

    def headers(self) -> dict[str, str]:
        """The response headers so far; none where nobody asked. `x-epd-timing-ms` counts from the arrival."""
        if not self._enabled:
            return {}
        if self._route is not None:  # an encoder may have answered after the attempt began
            stages = zip(("encode", "prefill", "decode"), ("+".join(self._encoders), *self._route), strict=True)
            self.say("instances", ", ".join(f"{stage}={instance}" for stage, instance in stages if instance))
        headers = {f"x-epd-{name}": _printable(value) for name, value in self._facts.items()}
        return {**headers, "x-epd-timing-ms": ", ".join(self._stamps)}


NO_EXPLANATION = Explanation("", enabled=False)
"""The explanation of a job that nobody wants explained; it keeps nothing, so all share it."""


def _printable(value: str) -> str:
    """Header-safe: names of instances come from other hosts too."""
    return "".join(char if " " <= char <= "~" else "?" for char in value[:MAX_VALUE_CHARS])
