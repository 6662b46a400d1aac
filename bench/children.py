"""Processes that a measurement directs: one JSON line in, one JSON line out.

Owns the pipe and its deadlines, on both ends. A child ends when its input does, so none outlives the measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.record import ROOT
from epd_serve.errors import StageError

STOP_S = 10.0
_TAIL_BYTES = 2000

Message = dict[str, Any]


class Child:
    """`python -m MODULE` with a line of configuration and then commands on its input."""

    def __init__(self, module: str, config: Mapping[str, Any], env: Mapping[str, str] | None = None) -> None:
        self._name = module
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **(env or {}), "PYTHONPATH": path},
        )
        self._rest = b""
        self.tell(**config)

    def tell(self, **message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._error("is gone") from None

    def hear(self, timeout_s: float = 60.0) -> Message:
        """The next line.

        Raises:
            StageError: the child ended or said nothing in time; with the end of its log.
        """
        assert self._process.stdout is not None
        end = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                raise self._error("ended" if ready else f"said nothing for {timeout_s:g} s")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def ask(self, timeout_s: float = 60.0, **message: Any) -> Message:
        self.tell(**message)
        return self.hear(timeout_s)

    def stop(self) -> None:
        """End of input, then of patience."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _error(self, what: str) -> StageError:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL_BYTES))
        return StageError(f"{self._name} {what}:\n{self._log.read().decode(errors='replace')}", stage=self._name)


def commands() -> Iterator[Message]:
    """In the child: the lines of its input, until it ends."""
    for line in sys.stdin.buffer:
        yield json.loads(line)


def answering() -> Callable[..., None]:
    """In the child: a function that writes one line to the parent. Everything else that prints goes to the log.

    The line is written whole: a bare `os.write` stops in the middle of a long one where a signal comes, or the io_uring
    of an event loop that has just been closed (uvloop's), and the parent would wait for the rest until its deadline.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(**message: Any) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    return answer
