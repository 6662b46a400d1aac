"""Workers of D, and links of P to them, that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_serve import wire
from tests.epd_serve.engine.kv.receiver.ends import (
    Decode,
    Prefill,
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Decode]]:
    started: list[Decode] = []

    def make(**options: Any) -> Decode:
        started.append(Decode(tmp_path, **options))
        return started[-1]

    yield make
    for decode in started:
        decode.receiver.close()
        assert not getattr(decode.device, "broken", [])


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Callable[..., Prefill]]:
    """P workers; by default their hello has been accepted."""
    made: list[Prefill] = []

    def make(decode: Decode, *, opened: bool = True, **options: Any) -> Prefill:
        made.append(Prefill(decode, tmp_path / f"staging-{len(made)}", **options))
        if opened:
            assert isinstance(made[-1].hello(), wire.HelloAck)
        return made[-1]

    yield make
    for prefill in made:
        prefill.socket.close()
