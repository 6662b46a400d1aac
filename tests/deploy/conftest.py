"""Run directories hold sockets, whose paths are short: pytest's own temporary directories are too deep for them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="epd-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
