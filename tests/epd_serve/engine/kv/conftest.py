"""Ends of links that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_serve.engine import vital_thread
from epd_serve.engine.kv import link_peer
from epd_serve.kv import control
from epd_serve.kv.transport_selection import SHM
from tests.epd_serve.engine.kv.fakes import DecodeEnd, Ends
from tests.epd_serve.engine.kv.two_stages import HUNG_S, Stages
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said again and again, and tried again, is waited for in many tests."""
    monkeypatch.setattr(control, "_BEAT_S", 0.05)
    monkeypatch.setattr(link_peer, "_RETRY_S", 0.05)


@pytest.fixture(autouse=True)
def the_stage_lives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What would end this process fails the test."""
    ended: list[str] = []
    monkeypatch.setattr(vital_thread, "end_stage", ended.append)
    yield
    assert not ended


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


@pytest.fixture
def transport() -> str:
    return SHM


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str) -> Iterator[Stages]:
    monkeypatch.setattr(vital_thread, "HUNG_S", HUNG_S)
    made = Stages(tmp_path, monkeypatch, transport)
    yield made
    made.close()
