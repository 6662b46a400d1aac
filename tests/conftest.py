"""What every test may rely on: markers that skip themselves where their need is not met."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes examples slow, which says nothing about them. `make test` draws the same ones every time: when it
# fails, the change has done it. `make test-all` looks for others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")


def _mooncake_problem() -> str | None:
    """Why Mooncake cannot be used here, or None."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install '.[mooncake]'"
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        return f"Mooncake does not load ({error}): apt-get install libibverbs1"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("mooncake")]
    if needing and (problem := _mooncake_problem()):
        for item in needing:
            item.add_marker(pytest.mark.skip(reason=problem))
