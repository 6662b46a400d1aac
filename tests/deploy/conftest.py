"""Run directories hold sockets, whose paths are short: pytest's own temporary directories are too deep for them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.host.launches import reap_dead
from deploy.host.ports import free_ports
from tests.deploy.launched import FakeLaunch


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="epd-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., FakeLaunch]]:
    made: list[FakeLaunch] = []

    def start(layout: str, *flags: str, port: int | None = None) -> FakeLaunch:
        made.append(FakeLaunch(tmp_path / "run", port or free_ports(1)[0], layout, *flags))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()
    reap_dead(tmp_path / "run")
