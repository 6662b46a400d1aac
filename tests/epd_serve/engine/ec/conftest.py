from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from store.arena import Arena
from tests.epd_serve.engine.ec.stages import Stages, make_arena


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
