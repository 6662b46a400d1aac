"""The quick form of every soak test: `python -m tests.soak.NAME --quick`. Speed is the command's to judge."""

from __future__ import annotations

import pytest

from tests.soak import (
    abuse,
    burst,
    conversations,
    fuzz,
    kills,
    leave,
    memory,
    neighbours,
    placement,
    ray_kills,
    real_time,
    small_arena,
    streams,
    table5,
)
from tests.soak.harness import Soak

SOAKS = (
    abuse,
    burst,
    conversations,
    kills,
    leave,
    memory,
    neighbours,
    placement,
    real_time,
    small_arena,
    streams,
    table5,
)


@pytest.mark.slow
@pytest.mark.parametrize("soak", [one.SOAK for one in SOAKS], ids=lambda soak: soak.name)
def test_its_goals_are_met(soak: Soak) -> None:
    assert soak.missed(soak.run(["--quick"]), speed=False) == []


@pytest.mark.slow
@pytest.mark.e2e
def test_no_body_is_a_server_error_behind_simulated_and_real_stages() -> None:
    assert fuzz.SOAK.missed(fuzz.SOAK.run(["--quick"]), speed=False) == []


@pytest.mark.slow
def test_nobody_notices_what_is_killed_or_changed_on_ray() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    assert ray_kills.SOAK.missed(ray_kills.SOAK.run(["--quick"]), speed=False) == []
