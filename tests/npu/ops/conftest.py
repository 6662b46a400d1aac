"""The memory of the card, opened once in this process."""

from __future__ import annotations

import pytest

from npu_ops.memory import DeviceMemory, open_memory
from tests.npu.card import Card


@pytest.fixture(scope="session")
def memory(card: Card) -> DeviceMemory:
    """Of the first device that this process sees, entered by this thread."""
    opened = open_memory(card.kind)
    opened.enter_thread()
    return opened
