from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.host.ports import free_ports
from store.arena import Arena
from store.mooncake.master import MasterSettings, health_url, master_command, rpc_address
from tests.epd_serve.engine.ec.stages import Stages, make_arena
from tests.waiting import wait_for


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = make_arena()
    yield made
    made.close()
    Arena.unlink(made.path)


@pytest.fixture
def stages(arena: Arena, tmp_path: Path) -> Iterator[Stages]:
    made = Stages(arena, tmp_path)
    yield made
    made.close()
    assert arena.stats().leased == 0, "a pin leaked"


@pytest.fixture
def master() -> Iterator[str]:
    """A Mooncake master, as `host:port`."""
    rpc_port, metrics_port = free_ports(2)
    with running_master(MasterSettings(rpc_port=rpc_port, metrics_port=metrics_port)) as address:
        yield address


@contextlib.contextmanager
def running_master(settings: MasterSettings) -> Iterator[str]:
    executable = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or "mooncake_master"
    process = subprocess.Popen(master_command(settings, executable), stderr=subprocess.DEVNULL)

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(health_url(settings), timeout=1) as answer:
                return b"service_ready" in answer.read() or answer.status == 200
        except OSError:
            return False

    try:
        wait_for(healthy)
        yield rpc_address(settings)
    finally:
        process.kill()
        process.wait(10)
