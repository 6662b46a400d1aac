"""Which transports are offered where, and the engine that starts when somebody needs it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from epd_serve.engine.kv.transport import LinkError
from epd_serve.engine.kv.transports import OnDemand, offered, quarantine_s
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from tests.waiting import PATIENCE_S


def wiring(transport: str) -> StageWiring:
    return StageWiring("D0", Role.D, "d1", kv_transport=transport)


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("transport", ["shm", "mooncake"])
def test_a_choice_is_kept_to(transport: str, device: str) -> None:
    assert offered(wiring(transport), device) == (transport,)


@pytest.mark.parametrize(("device", "names"), [("cpu", ("shm",)), ("cuda", ("shm",)), ("npu", ("mooncake", "shm"))])
def test_on_one_host_npus_write_directly_and_fall_back_to_shared_memory(device: str, names: tuple[str, ...]) -> None:
    assert offered(wiring("auto"), device) == names


@pytest.mark.parametrize(
    ("transport", "device", "kept_s"), [("auto", "cpu", 0.0), ("auto", "npu", 30.0), ("mooncake", "cpu", 30.0)]
)
def test_blocks_are_kept_where_a_late_write_could_land(transport: str, device: str, kept_s: float) -> None:
    assert quarantine_s(wiring(transport), device) == kept_s


def test_an_engine_starts_once_however_many_links_ask() -> None:
    started: list[Any] = []
    together = threading.Barrier(4)

    def start() -> Any:
        started.append(object())
        return started[-1]

    endpoint = OnDemand(start)

    def ask(_: int) -> Any:
        together.wait(PATIENCE_S)
        return endpoint()

    assert not started
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == set(started)
    assert len(started) == 1


def test_an_engine_that_does_not_start_is_not_tried_at_every_link() -> None:
    tries = []

    def start() -> Any:
        tries.append(1)
        raise LinkError("not installed")

    endpoint = OnDemand(start)
    for _ in range(3):
        with pytest.raises(LinkError, match="not installed"):
            endpoint()
    assert len(tries) == 1


@pytest.mark.parametrize(("together", "kept_s"), [(True, 0.0), (False, 30.0), (None, 30.0)])
def test_blocks_are_kept_for_whoever_is_or_may_be_on_another_node(together: bool | None, kept_s: float) -> None:
    assert quarantine_s(wiring("auto"), "cpu", same_node=together) == kept_s
