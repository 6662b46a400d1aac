"""What every test may rely on: markers that skip themselves where their need is not met, and that nobody stops the time
a property test takes."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # a busy machine is no defect of the code
settings.load_profile("unhurried")


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
