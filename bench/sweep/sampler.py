"""What each stage runs and keeps waiting, asked several times a second while a rate is measured.

One thread beside the load generator. It also notices an instance that ends or is another one suddenly, which is what
makes a run worthless however many of its answers were good.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from bench.clients.sender import realtime_priority
from bench.sweep.running import StageStatus
from epd_serve.errors import ConfigError

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
