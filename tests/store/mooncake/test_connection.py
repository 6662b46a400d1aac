"""A connection that cannot come up: what it began is given back."""

from __future__ import annotations

import pytest

from store.errors import StoreError
from store.mooncake import tier
from store.mooncake.client import MooncakeConfig
from store.mooncake.tier import MooncakeStore
from tests.waiting import wait_for


def test_a_client_whose_memory_is_refused_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []

    class Refuses:
        def __init__(self, config: MooncakeConfig) -> None:
            """Connects."""

        def register(self, address: int, nbytes: int) -> None:
            raise StoreError("plain host memory is refused")

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(tier, "load_mooncake", lambda host: None)
    monkeypatch.setattr(tier, "MooncakeClient", Refuses)
    made = MooncakeStore(MooncakeConfig(master="127.0.0.1:1"))
    wait_for(lambda: closed)
    assert made.client is None and made.guard.state == "down"
    made.close()
