"""What goes wrong on purpose, so that tests can meet a fault at an exact moment: `--kv-faults`, empty in production.

    drop=Ready:0.5        half of all Ready messages are not sent
    delay=Done:0.2s       each Done leaves 0.2 s late (others overtake it)
    double=Cancel:1       each Cancel is sent twice
    pause=packet:/run/x   armed by a number N in the file /run/x: the Nth time from then on that this point is reached,
                          the file is renamed to /run/x.here, and the caller waits until somebody removes that
    seed=7                of the draws (default 0)

Clauses are joined by `;`. Messages are those of `epd_serve.wire` between P and D, chances lie between 0 and 1. Points:
`ready` (D, before READY leaves), `packet` (P's worker, before a packet is moved), `done` (P's worker, before DONE
leaves), `received` (D's worker, DONE has arrived and is not reported yet).
"""

from __future__ import annotations

import functools
import math
import random
import threading
import time
from pathlib import Path
from typing import get_args

from epd_serve import wire
from epd_serve.errors import ConfigError

_ON_TIME = (0.0,)
_POLL_S = 0.01
_PAUSE_S = 120.0  # a test that died must not leave a thread waiting for ever
POINTS = ("ready", "packet", "done", "received")
_DIRECTIONS = (wire.ToPrefillScheduler, wire.ToDecodeScheduler, wire.ToPrefillWorker, wire.ToDecodeWorker)
MESSAGES = frozenset(message.__name__ for direction in _DIRECTIONS for message in get_args(direction))


class Faults:
    """One per process. Thread-safe.

    Raises:
        ConfigError: a clause that means nothing.
    """

    def __init__(self, text: str = "") -> None:
        self._drop: dict[str, float] = {}
        self._double: dict[str, float] = {}
        self._delay_s: dict[str, float] = {}
        self._pause: dict[str, Path] = {}
        self._count: dict[str, int] = {}
        self._chance = random.Random(0)
        self._lock = threading.Lock()
        for clause in filter(None, text.split(";")):
            self._read(clause)

    def deliveries(self, message: object) -> tuple[float, ...]:
        """When this message leaves, in seconds from now: () never, (0.0,) as it should, two entries twice."""
        if not (self._drop or self._double or self._delay_s):
            return _ON_TIME
        kind = type(message).__name__
        with self._lock:
            if self._chance.random() < self._drop.get(kind, 0.0):
                return ()
            delay = self._delay_s.get(kind, 0.0)
            return (delay, delay) if self._chance.random() < self._double.get(kind, 0.0) else (delay,)

    def reached(self, point: str) -> None:
        """The caller is at this point; blocks while it is paused there."""
        if point not in self._pause:
            return
        armed = self._pause[point]
        with self._lock:
            try:
                number = int(armed.read_text())
            except FileNotFoundError:
                self._count[point] = 0
                return
            self._count[point] = self._count.get(point, 0) + 1
            if self._count[point] < number:
                return
            self._count[point] = 0
            here = armed.rename(here_of(armed))
        deadline = time.monotonic() + _PAUSE_S
        while here.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _read(self, clause: str) -> None:
        kind, _, rest = clause.partition("=")
        what, _, value = rest.partition(":")
        try:
            if kind == "seed":
                self._chance.seed(int(what))
            elif kind in ("drop", "double") and what in MESSAGES and 0 <= (chance := float(value)) <= 1:
                (self._drop if kind == "drop" else self._double)[what] = chance
            elif kind == "delay" and what in MESSAGES and 0 <= (delay_s := float(value.removesuffix("s"))) < math.inf:
                self._delay_s[what] = delay_s
            elif kind == "pause" and what in POINTS and value:
                self._pause[what] = Path(value)
            else:
                raise ValueError(clause)
        except ValueError as error:
            raise ConfigError(f"{clause!r} is no fault (epd_serve/kv/faults.py)", param="--kv-faults") from error


def here_of(armed: Path) -> Path:
    """What a file that arms a pause is called while somebody is paused there."""
    return armed.with_name(armed.name + ".here")


@functools.cache
def faults_of(text: str) -> Faults:
    """This process's. Scheduler and worker of a stage may share a process, and then they count together."""
    return Faults(text)
