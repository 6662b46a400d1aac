"""Ends of links that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.epd_serve.engine.kv.fakes import DecodeEnd, Ends
from tests.waiting import wait_for


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Ends]:
    """Starts ends that are closed when the test ends (P first, as its links may wait for D)."""
    ends: list[Any] = []

    def make(kind: type, *args: Any, **options: Any) -> Any:
        ends.append(kind(tmp_path, *args, **options))
        return ends[-1]

    yield make
    for end in sorted(ends, key=lambda end: isinstance(end, DecodeEnd)):
        end.close()
    wait_for(lambda: not list(tmp_path.glob("staging-*")))  # a link with little patience is not waited for
