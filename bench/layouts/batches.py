"""What each stage runs and keeps waiting, looked at several times a second while a rate is measured.

One thread beside the load generator. It also notices an instance that ends or is another one suddenly, which is what
makes a run worthless however many of its answers were good.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from bench.client.ahead import ahead
from epd_serve.errors import ConfigError

EVERY_S = 0.25
STOP_S = 30.0
"""For a look that is under way to end; it has a deadline of its own."""


@dataclass(frozen=True, slots=True)
class StageNow:
    """One instance as it is now.

    Attributes:
        life: names the process; another one, and it was restarted. down: why it is not up, else "".
        running, waiting: requests, as its scheduler says.
    """

    instance: str
    role: str
    life: str
    down: str = ""
    running: int = 0
    waiting: int = 0


Look = Callable[[], Sequence[StageNow]]
"""The instances now. Raises OSError where nobody answers."""


class Sampler:
    """Looks every `EVERY_S` seconds while the context lasts, and appends what it saw to a file.

    Attributes:
        died: instances that were lost meanwhile, with what is known of it.

    Raises:
        ConfigError: at the end of the context, where the file could not be written.
    """

    def __init__(self, look: Look, path: Path, run: str) -> None:
        self.died: dict[str, str] = {}
        self._look, self._path, self._run = look, path, run
        self._lives: dict[str, str] = {}
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
            with ahead(), self._path.open("a", encoding="utf-8") as file:
                while True:
                    last = self._over.is_set()
                    self._once(file)
                    if last:  # what died a moment ago is seen, too
                        return
                    self._over.wait(EVERY_S)
        except OSError as error:
            self._fault = error

    def _once(self, file: IO[str]) -> None:
        try:
            seen = self._look()
        except OSError:
            return  # nobody answers: the requests of the run say so as well
        t_s = round(time.perf_counter(), 6)
        for one in seen:
            if one.down:
                self.died.setdefault(one.instance, one.down)
            elif self._lives.setdefault(one.instance, one.life) != one.life:
                self.died.setdefault(one.instance, "it was restarted")
            line = {"run": self._run, "t_s": t_s, "instance": one.instance, "role": one.role}
            said = {**line, "running": one.running, "waiting": one.waiting}
            file.write(json.dumps(said, separators=(",", ":")) + "\n")
        file.flush()
