"""Other proxies run beside ours: started from a command, waited for until they listen, ended with the context."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.record import ROOT
from deploy.parent_death_exec import parent_death_exec
from deploy.ports import free_ports
from epd_serve.errors import StageError

START_S = 60.0
STOP_S = 10.0


@dataclass(frozen=True)
class Rival:
    """A proxy that listens. `pid` is its process."""

    name: str
    url: str
    pid: int


@contextlib.contextmanager
def bare_relay(*stages: str) -> Iterator[Rival]:
    """`bench/proxy_relay.py` in front of stages (URLs)."""
    (port,) = free_ports(1)
    with running("bare relay", port, [sys.executable, "-m", "bench.proxy_relay", str(port), *stages]) as rival:
        yield rival


@contextlib.contextmanager
def running(name: str, port: int, argv: Sequence[str]) -> Iterator[Rival]:
    """`argv` until the context ends; its output goes to a file that is shown when it does not start.

    Raises:
        StageError: it ended, or did not listen on `port` within `START_S`.
    """
    with tempfile.TemporaryFile() as log:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", *parent_death_exec(argv, signal.SIGINT)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            end = time.monotonic() + START_S
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise StageError(
                        f"{name} did not start:\n{log.read()[-2000:].decode(errors='replace')}", stage=name
                    )
                time.sleep(0.05)
            yield Rival(name, f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.send_signal(signal.SIGINT)  # as Ctrl-C: uvicorn would die of SIGTERM after its shutdown
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False
