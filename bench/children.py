"""Processes that a measurement directs: a message in, a message out, over a pipe.

Owns the pipe and its deadlines, on both ends. A child ends when its parent's end of the pipe does, so none outlives the
measurement.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from epd_serve.errors import StageError

STOP_S = 10.0


@dataclass(frozen=True)
class _Failure:
    """What a child sends instead of an answer. `text`: its traceback."""

    text: str


class Child:
    """`main(pipe, *given)` of a module in a new interpreter: reads orders until None comes, and sends answers.

    Args:
        module: what it prints goes to stderr.
        env: variables that are set before it is imported.
    """

    def __init__(self, module: str, *given: Any, env: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = module
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(module, theirs, dict(env or {}), given), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, order: Any) -> None:
        """Raises StageError where the child is gone."""
        try:
            self._pipe.send(order)
        except OSError:
            raise self._error("is gone") from None

    def hear(self, timeout_s: float = 60.0) -> Any:
        """The next answer. Raises StageError where the child failed, ended or said nothing in time."""
        try:
            answer = self._pipe.recv() if self._pipe.poll(timeout_s) else _Failure(f"said nothing for {timeout_s:g} s")
        except (EOFError, OSError):
            answer = _Failure("ended")
        if isinstance(answer, _Failure):
            raise self._error(answer.text)
        return answer

    def ask(self, order: Any, timeout_s: float = 60.0) -> Any:
        self.tell(order)
        return self.hear(timeout_s)

    def stop(self) -> None:
        """End of orders, then of patience."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(STOP_S)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _error(self, what: str) -> StageError:
        return StageError(f"{self._name} {what}", stage=self._name)


def _run(module: str, pipe: Connection, env: Mapping[str, str], given: tuple[Any, ...]) -> None:
    """In the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who measures ends this one
    os.dup2(2, 1)
    os.environ.update(env)
    with contextlib.suppress(EOFError, BrokenPipeError):  # nobody is there who asks
        try:
            importlib.import_module(module).main(pipe, *given)
        except EOFError:
            raise
        except Exception:  # noqa: BLE001  (whoever asked raises it)
            pipe.send(_Failure(f"failed:\n{traceback.format_exc()}"))
