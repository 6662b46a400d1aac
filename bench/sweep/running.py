"""A deployment that serves, however it was started, and what its instances do while a rate is measured.

Our proxy says that in its status table (`GET /instances`), a plain server in its metrics. Both are asked several times
a second, by one thread beside the load generator, which also notices an instance that ends or is another one suddenly:
that makes a run worthless however many of its answers were good.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.clients.sender import realtime_priority
from bench.clients.target import Target
from bench.statistic import percentile
from epd_serve.errors import StageError

ASK_S = 10.0
_REQUESTS = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StageStatus:
    """One instance as it is now.

    Attributes:
        incarnation: names the process; another one, and it was restarted.
        down: why it is not up, else "".
        running, waiting: requests, as its scheduler says.
    """

    instance: str
    role: str
    incarnation: str
    down: str = ""
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class RunningDeployment:
    """Something that serves a deployment.

    Attributes:
        target: whom to load. model: as it is called there.
        ready_s: from its start until it was ready.
        status: what its instances run now; raises StageError where nobody answers.
        traces: folder of its phase stamps, or None.
        shared_cores: its devices are virtual, and there are fewer cores than devices.
    """

    target: Target
    model: str
    ready_s: float
    status: Callable[[], Sequence[StageStatus]]
    traces: Path | None = None
    shared_cores: bool = False


def proxy_status(url: str) -> list[StageStatus]:
    """The instances of our proxy at `url`. Raises StageError where it does not answer."""
    found = []
    for one in Target(url).ask("/instances", limit_s=ASK_S).json()["instances"]:
        stage = one["stage"] or {}
        down = "" if one["up"] else one["reason"] or "it is down"
        counts = (int(stage.get(name, 0)) for name in ("running", "waiting"))
        found.append(StageStatus(one["id"], one["role"], one["incarnation"], down, *counts))
    return found


def server_status(url: str, instance: str, incarnation: str) -> StageStatus:
    """A plain server at `url`. Raises StageError where it does not answer."""
    counts = {"running": 0.0, "waiting": 0.0}
    for name, value in _REQUESTS.findall(Target(url).ask("/metrics", limit_s=ASK_S).text):
        counts[name] += float(value)
    return StageStatus(instance, "EPD", incarnation, "", int(counts["running"]), int(counts["waiting"]))


EVERY_S = 0.25
STOP_S = 30.0
"""For a question that is under way to end; it has a deadline of its own."""


@dataclass
class Samples:
    """What instances did while a run lasted.

    Attributes:
        died: instances that were lost meanwhile, with what is known of it.
        seen: by role, of each instance at each look (running, waiting).
    """

    died: dict[str, str] = field(default_factory=dict)
    seen: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    incarnations: dict[str, str] = field(default_factory=dict)

    def add(self, now: Sequence[StageStatus]) -> None:
        """A look at all of them."""
        for one in now:
            if one.down:
                self.died.setdefault(one.instance, one.down)
            elif self.incarnations.setdefault(one.instance, one.incarnation) != one.incarnation:
                self.died.setdefault(one.instance, "it was restarted")
            self.seen.setdefault(one.role, []).append((one.running, one.waiting))

    def figures(self) -> dict[str, Any]:
        """By role, sequences of one instance: `running` with mean, P10 and P90, and `waiting`, mean."""
        return {
            role: {
                "running": {"mean": float(running.mean()), **{f"p{at}": percentile(running, at) for at in (10, 90)}},
                "waiting": float(waiting.mean()),
            }
            for role, own in self.seen.items()
            for running, waiting in [np.array(own, dtype=float).T]
        }


@contextlib.contextmanager
def sampled(status: Callable[[], Sequence[StageStatus]]) -> Iterator[Samples]:
    """Look every `EVERY_S` seconds while the context lasts, and once more at its end.

    Args:
        status: the instances now; raises StageError where nobody answers: the requests of the run say so as well.
    """
    samples, over = Samples(), threading.Event()

    def watch() -> None:
        with realtime_priority():  # starved while it holds the interpreter, it would keep the generator waiting
            last = False
            while True:
                with contextlib.suppress(StageError):
                    samples.add(status())
                if last:
                    return
                last = over.wait(EVERY_S)

    thread = threading.Thread(target=watch, name="samples", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join(STOP_S)
