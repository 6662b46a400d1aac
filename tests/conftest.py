"""What every test may rely on: markers that skip themselves where their need is not met."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import settings

# An example that meets a busy machine is slow, not wrong.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


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
