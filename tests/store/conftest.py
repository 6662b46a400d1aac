"""Arenas and Mooncake masters for tests, and the promise that they leave nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.host.ports import free_ports
from store.arena import Arena
from store.feature import Buffer, FeatureMeta
from store.mooncake.client import MooncakeConfig
from store.mooncake.master import MasterSettings, health_url, master_command, rpc_address
from tests.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
CAPACITY = 64 * 4096


@pytest.fixture
def arena_path() -> Iterator[Path]:
    path = Path(f"/dev/shm/epd-test-{uuid.uuid4().hex}-arena")
    yield path
    Arena.unlink(path)
    assert not path.exists()


@pytest.fixture
def other_path() -> Iterator[Path]:
    """The arena of another host."""
    path = Path(f"/dev/shm/epd-test-{uuid.uuid4().hex}-arena")
    yield path
    Arena.unlink(path)


@pytest.fixture
def arena(arena_path: Path) -> Iterator[Arena]:
    """Room for 64 pages and 32 features."""
    made = Arena.create(arena_path, CAPACITY, slots=32, owners=8)
    yield made
    made.close()


def get_into(arena: Arena, key: str, dest: Buffer, *, verify: bool = True) -> FeatureMeta | None:
    """Copies a feature to the start of `dest`; None when it is missing."""
    lease = arena.lease(key, verify=verify)
    if lease is None:
        return None
    with lease:
        memoryview(dest).cast("B")[: lease.nbytes] = lease.view()
        return lease.meta


Child = subprocess.Popen[str]
CONTAINED = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def python() -> Iterator[Callable[..., Child]]:
    """Starts `code` in a new interpreter with pipes; whatever still runs at the end of the test is killed.

    `contained`: as the first process of a PID namespace of its own, which ends with it.
    """
    children: list[Child] = []

    def start(code: str, *arguments: object, contained: bool = False) -> Child:
        child = subprocess.Popen(
            [*(CONTAINED if contained else ()), sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate(timeout=10)


class Master:
    """A real `mooncake_master` on loopback, impatient enough for tests."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        rpc_port, metrics_port = free_ports(2, host)
        self.settings = MasterSettings(
            host=host,
            rpc_port=rpc_port,
            metrics_port=metrics_port,
            lease_s=1.5,
            client_ttl_s=3,
            put_discard_s=1,
            put_release_s=3,
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        executable = shutil.which("mooncake_master") or str(Path(sys.executable).with_name("mooncake_master"))
        self.process = subprocess.Popen(
            master_command(self.settings, executable), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(lambda: self._answers() or self.process.poll() is not None, "the master to answer")
        assert self.process.poll() is None, "the master has ended"

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(health_url(self.settings), timeout=1) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def config(self, **options: object) -> MooncakeConfig:
        """Of a client whose keys meet nobody else's unless it says so."""
        return MooncakeConfig(
            **{
                "master": rpc_address(self.settings),
                "namespace": f"{uuid.uuid4().hex}/",
                "timeout_s": 30.0,
                **options,
            }  # type: ignore[arg-type]
        )


@pytest.fixture(scope="session")
def shared_master() -> Iterator[Master]:
    """For tests that leave it alone."""
    master = Master()
    master.start()
    yield master
    master.kill()


@pytest.fixture
def own_master() -> Iterator[Master]:
    """For tests that kill it."""
    master = Master()
    master.start()
    yield master
    master.kill()
