"""What a measurement runs beside our proxy: any other program that listens, by `deploy/host/started.py`."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from deploy.host.started import started


def answers(url: str, says: str = "") -> bool:
    """Whether somebody on this machine answers at `url` with 200, and `says` in the text."""
    try:  # there is nothing to verify, and to load certificates at each look would take 20 ms of a core
        answer = httpx.get(url, timeout=5.0, trust_env=False, verify=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and says in answer.text


START_S = 60.0


class Rival(NamedTuple):
    """Something that answers requests. `pids`: its processes, none where their CPU time is not asked for."""

    name: str
    url: str
    pids: tuple[int, ...] = ()


@contextlib.contextmanager
def running(name: str, port: int, argv: Sequence[str]) -> Iterator[Rival]:
    """Run `argv` until the context ends; its output goes to a file that is shown when it does not start.

    Raises:
        StageError: it ended, or did not listen on `port` within `START_S`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="epd-bench-") as folder,
        started(argv, Path(folder) / "log", name=name) as process,
    ):
        process.ready(lambda: _listens(port), START_S)
        yield Rival(name, f"http://127.0.0.1:{port}", (process.process.pid,))


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False
