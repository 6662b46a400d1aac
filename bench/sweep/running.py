"""A deployment that serves, however it was started, and what its instances do while a rate is measured.

Our proxy says that in its status table (`GET /instances`), a plain server in its metrics. Both are asked several times
a second, by one thread beside the load generator, which also notices an instance that ends or is another one suddenly:
that makes a run worthless however many of its answers were good.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from bench.clients.sender import realtime_priority
from bench.clients.target import Target
from epd_serve.errors import ConfigError

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
        status: what its instances run now; raises OSError where nobody answers.
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
    """The instances of our proxy at `url`. Raises OSError where it does not answer."""
    found = []
    for one in _get(f"{url}/instances").json()["instances"]:
        stage = one["stage"] or {}
        down = "" if one["up"] else one["reason"] or "it is down"
        counts = (int(stage.get(name, 0)) for name in ("running", "waiting"))
        found.append(StageStatus(one["id"], one["role"], one["incarnation"], down, *counts))
    return found


def server_status(url: str, instance: str, incarnation: str) -> StageStatus:
    """A plain server at `url`. Raises OSError where it does not answer."""
    counts = {"running": 0.0, "waiting": 0.0}
    for name, value in _REQUESTS.findall(_get(f"{url}/metrics").text):
        counts[name] += float(value)
    return StageStatus(instance, "EPD", incarnation, "", int(counts["running"]), int(counts["waiting"]))


def _get(url: str) -> httpx.Response:
    try:  # on this machine: no proxy stands between, and certificates would take 20 ms of a core to load
        return httpx.get(url, timeout=ASK_S, trust_env=False, verify=False)
    except httpx.HTTPError as error:
        raise OSError(f"{url}: {error!r}") from error


EVERY_S = 0.25
STOP_S = 30.0
"""For a question that is under way to end; it has a deadline of its own."""


class Sampler:
    """Asks every `EVERY_S` seconds while the context lasts, and appends the answers to a file.

    Attributes:
        died: instances that were lost meanwhile, with what is known of it.

    Args:
        status: the instances now; raises OSError where nobody answers.

    Raises:
        ConfigError: at the end of the context, where the file could not be written.
    """

    def __init__(self, status: Callable[[], Sequence[StageStatus]], path: Path, run: str) -> None:
        self.died: dict[str, str] = {}
        self._status, self._path, self._run = status, path, run
        self._incarnations: dict[str, str] = {}
        self._over = threading.Event()
        self._fault: OSError | None = None
        self._thread = threading.Thread(target=self._watch, name="batches", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(STOP_S)
        if self._fault is not None and kind is None:
            raise ConfigError(f"--out: {self._path}: {self._fault.strerror}", param="--out") from self._fault

    def _watch(self) -> None:
        try:
            # starved while it holds the interpreter, it would keep the generator waiting
            with realtime_priority(), self._path.open("a", encoding="utf-8") as file:
                self._sample(file)
                while not self._over.wait(EVERY_S):
                    self._sample(file)
                self._sample(file)  # what died a moment ago is seen, too
        except OSError as error:
            self._fault = error

    def _sample(self, file: IO[str]) -> None:
        try:
            seen = self._status()
        except OSError:
            return  # nobody answers: the requests of the run say so as well
        t_s = round(time.perf_counter(), 6)
        for one in seen:
            if one.down:
                self.died.setdefault(one.instance, one.down)
            elif self._incarnations.setdefault(one.instance, one.incarnation) != one.incarnation:
                self.died.setdefault(one.instance, "it was restarted")
            line = {"run": self._run, "t_s": t_s, "instance": one.instance, "role": one.role}
            line |= {"running": one.running, "waiting": one.waiting}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        file.flush()
