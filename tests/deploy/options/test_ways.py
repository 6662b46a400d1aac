"""Which way KV goes between instances, by layout and device."""

from __future__ import annotations

import pytest

from deploy.options.config import DeployConfig
from deploy.options.ways import Ways, draw_ways
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.placement import lower


def ways(layout: str, device: str = "npu", *, cann: tuple[int, ...] = (), **options: str) -> Ways:
    plans = lower(parse(layout), range(8))
    return draw_ways(DeployConfig(**options), device, plans, cann=cann)  # type: ignore[arg-type]


def kv(found: Ways) -> dict[str, tuple[str, ...]]:
    return {f"{way.sender}→{way.taker}": way.transports for way in found.kv}


@pytest.mark.parametrize(
    ("layout", "device", "expected"),
    [
        ("(E-P)-D", "npu", {"P0→D0": ("mooncake", "shm")}),
        ("E-(P-D)", "npu", {"P0→D0": ("shm",)}),
        ("E-(P-D)-D", "npu", {"P0→D0": ("shm",), "P0→D1": ("mooncake", "shm")}),
        ("(P-D):tp2", "npu", None),
        ("P-D", "cuda", {"P0→D0": ("shm",)}),
        ("(P-D)", "cpu", {"P0→D0": ("shm",)}),
        ("E-PD", "npu", {}),
    ],
)
def test_kv_of_a_pair_on_one_npu_takes_shared_memory_and_of_two_mooncake(
    layout: str, device: str, expected: dict[str, tuple[str, ...]] | None
) -> None:
    if expected is None:
        layout, expected = "(P:tp2-D:tp2)", {"P0→D0": ("shm",)}
    assert kv(ways(layout, device)) == expected


@pytest.mark.parametrize("cann", [(), (8, 5, 0), (9, 0, 0)])
def test_mooncake_alone_for_a_pair_on_one_npu_is_refused_before_the_start(cann: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"P0→D0 share an NPU.*use --kv-transport auto"):
        ways("E-(P-D)", kv_transport="mooncake", cann=cann)


def test_mooncake_alone_is_believed_where_cann_can_connect_an_npu_with_itself() -> None:
    assert kv(ways("E-(P-D)", kv_transport="mooncake", cann=(9, 1, 0))) == {"P0→D0": ("mooncake",)}
    assert kv(ways("E-(P-D)", cann=(9, 1, 0))) == {"P0→D0": ("shm",)}  # off by default: it has not run


def test_mooncake_over_tcp_joins_processes_that_share_a_device() -> None:
    assert kv(ways("(P-D)", "cpu", kv_transport="mooncake")) == {"P0→D0": ("mooncake",)}
    assert kv(ways("(P-D)", "cuda", kv_transport="mooncake")) == {"P0→D0": ("mooncake",)}


def test_people_are_told_each_way_with_its_pairs() -> None:
    assert ways("(E-P-D)-P-D").lines() == [
        "KV P0→D0: shared memory (one device)",
        "KV P0→D1, P1→D0, P1→D1: Mooncake, and shared memory where a probe fails",
    ]
    assert ways("6P-D", "cpu").lines() == ["KV P0→D0, P1→D0, P2→D0, P3→D0 and 2 more: shared memory"]
    assert ways("TP1", "cpu").lines() == []
