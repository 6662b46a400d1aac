"""An API server for each test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.deploy.kubernetes.api_server import FakeApiServer


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeApiServer]:
    one = FakeApiServer(tmp_path)
    await one.start()
    yield one
    await one.stop()
