"""Arenas for tests, and the promise that they leave nothing in /dev/shm."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from store.arena import Arena

REPOSITORY = Path(__file__).resolve().parents[2]
CAPACITY = 64 * 4096


@pytest.fixture
def arena_path() -> Iterator[Path]:
    path = Path(f"/dev/shm/epd-test-{uuid.uuid4().hex}-arena")
    yield path
    Arena.unlink(path)
    assert not path.exists()


@pytest.fixture
def arena(arena_path: Path) -> Iterator[Arena]:
    """Room for 64 pages and 32 features."""
    made = Arena.create(arena_path, CAPACITY, slots=32, owners=8)
    yield made
    made.close()


Child = subprocess.Popen[str]


@pytest.fixture
def python() -> Iterator[Callable[..., Child]]:
    """Starts `code` in a new interpreter with pipes; whatever still runs at the end of the test is killed."""
    children: list[Child] = []

    def start(code: str, *arguments: object) -> Child:
        child = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
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
