"""A server that a measurement starts beside its layout: from when it is healthy until the context ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from bench.record import ROOT
from deploy.parent_death_exec import parent_death_exec
from epd_serve.errors import StageError

LOOK_S = 0.05
STOP_S = 10.0
_TAIL_BYTES = 2000


@contextlib.contextmanager
def started(argv: Sequence[str], health: str, log: Path, start_s: float, *, says: str = "") -> Iterator[None]:
    """Run `argv`, its output in `log`; it gets SIGINT at the end, and when this process dies.

    Args:
        health: a URL that answers 200 once it is ready, with `says` in the text.

    Raises:
        StageError: it ended or was not ready within `start_s`; with the end of its log.
    """
    command = [sys.executable, "-m", *parent_death_exec(argv, signal.SIGINT)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        end = time.monotonic() + start_s
        while not _healthy(health, says):
            if process.poll() is not None or time.monotonic() > end:
                tail = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
                raise StageError(f"{' '.join(argv[:5])} … is not ready:\n{tail}", stage=log.stem)
            time.sleep(LOOK_S)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(url: str, says: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.get(url, trust_env=False)
        return answer.status_code == 200 and says in answer.text
    return False
