"""A `mooncake_master` for one measurement: started on free ports of loopback, ended with the context."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from deploy.ports import free_ports
from epd_serve.errors import StageError
from store.mooncake.master import MasterSettings, health_url, master_command, rpc_address

PROGRAM = "mooncake_master"
START_S = 15.0
STOP_S = 5.0


def program() -> str | None:
    """Where the master is: beside this Python, or on PATH. None: not installed, Mooncake is left out."""
    return shutil.which(str(Path(sys.executable).parent / PROGRAM)) or shutil.which(PROGRAM)


@contextlib.contextmanager
def master() -> Iterator[str]:
    """Yields the address that clients are given.

    Raises:
        StageError: it is not installed, or not ready in time; with the end of its log.
    """
    found = program()
    if found is None:
        raise StageError(f"{PROGRAM} is not installed: pip install 'epd-serve[mooncake]'", stage=PROGRAM)
    rpc_port, metrics_port = free_ports(2)
    settings = MasterSettings(rpc_port=rpc_port, metrics_port=metrics_port)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            master_command(settings, found), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            if not _ready(process, health_url(settings)):
                log.seek(0)
                raise StageError(
                    f"{PROGRAM} is not ready:\n{log.read().decode(errors='replace')[-2000:]}", stage=PROGRAM
                )
            yield rpc_address(settings)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(process: subprocess.Popen[bytes], url: str) -> bool:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if "service_ready" in httpx.get(url, trust_env=False).text:
                return True
        time.sleep(0.05)
    return False
