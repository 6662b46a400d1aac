"""Which way features and KV go between instances, by layout and device."""

from __future__ import annotations

import pytest

from deploy.options.config import DeployConfig
from deploy.options.ways import Ways, draw_ways
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.placement import lower


def ways(layout: str, device: str = "npu", *, pooled: bool = True, cann: tuple[int, ...] = (), **options: str) -> Ways:
    plans = lower(parse(layout), range(8))
    return draw_ways(DeployConfig(**options), device, plans, pooled=pooled, cann=cann)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("layout", "device", "pooled", "asked", "direct"),
    [
        ("E-P-D", "npu", True, "auto", "E0 P0 D0"),
        ("(E-P)-D", "npu", True, "auto", ""),
        ("(E-P)-P-D", "npu", True, "auto", ""),  # the arena has every feature for P0: P1 finds it there
        ("(E-D)-P", "npu", True, "auto", ""),
        ("(E-P)-D", "npu", True, "device", "E0 P0 D0"),
        ("E-P-D", "npu", False, "auto", ""),
        ("E-P-D", "cpu", True, "auto", ""),
        ("E-P-D", "npu", True, "host", ""),
        ("(E-P)-D", "cpu", True, "device", "E0 P0 D0"),
    ],
)
def test_features_go_from_npu_to_npu_where_no_encoder_shares_it(
    layout: str, device: str, pooled: bool, asked: str, direct: str
) -> None:
    found = ways(layout, device, pooled=pooled, feature_path=asked)
    assert {name for name, path in found.features.items() if path == "device"} == set(direct.split())
    assert found.feature_path("nobody") == "host"


@pytest.mark.parametrize(
    ("device", "pooled", "message"), [("npu", False, "needs --mm-store mooncake"), ("cuda", True, "not for cuda")]
)
def test_the_device_path_where_it_cannot_be_is_refused(device: str, pooled: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ways("E-P-D", device, pooled=pooled, feature_path="device")


def test_people_are_told_each_way_with_its_pairs_and_why() -> None:
    assert ways("(E-P-D)-P-D").lines() == [
        "KV P0→D0: shared memory (one device)",
        "KV P0→D1, P1→D0, P1→D1: Mooncake, and shared memory where a probe fails",
        "features to P0, D0, P1, D1: the host's arena (P0, D0 share an NPU with an encoder)",
    ]
    assert ways("E-PD").lines() == ["features to PD0: straight into device memory, once a probe came through"]
    assert ways("6P-D", "cpu").lines() == ["KV P0→D0, P1→D0, P2→D0, P3→D0 and 2 more: shared memory"]
    assert ways("TP1", "cpu").lines() == []
