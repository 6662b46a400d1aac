"""AISBench as a process: run to its end, or ended when it takes too long; it leaves no process and no shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.aisbench.environment import outside
from bench.started import started
from deploy.host.processes import signal_group

GRACE_S = 45.0
"""For AISBench to end in good order: its processes wait for each other."""


def variables(host: str) -> dict[str, str]:
    """For AISBench: nothing from a model hub, no proxy between it and the endpoint, no display that it draws itself."""
    without = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), host]))
    fixed = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
    return {**outside(), **fixed, "no_proxy": without, "NO_PROXY": without}


def run(
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    *,
    host: str = "127.0.0.1",
    log: str = "ais_bench.log",
    more: Mapping[str, str] | None = None,
) -> int | None:
    """Run `command` in `folder`, for at most `limit_s`; what it prints is in the file `log` there.

    Args:
        host: of the endpoint. more: variables beside the usual.

    Returns:
        Its exit code, which is 0 for failed requests too; None where it took too long. It then got Ctrl-C, as all its
        processes do on a terminal, and time to write what it had.
    """
    argv = ["env", "-C", str(folder), *command]
    with started(argv, folder / log, env={**variables(host), **(more or {})}, stop_s=GRACE_S) as it:
        try:
            return it.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            signal_group(it.process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                it.process.wait(GRACE_S)
            return None
