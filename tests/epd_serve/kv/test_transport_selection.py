"""Which transports a pair may take, by device and by whether it shares one."""

from __future__ import annotations

import pytest

from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.kv.transport_selection import MOONCAKE, SHM, between, transports_between, why_not


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_a_pair_on_one_device_meets_in_shared_memory(device: str) -> None:
    assert transports_between("auto", device, colocated=True) == (SHM,)


@pytest.mark.parametrize(("device", "expected"), [("npu", (MOONCAKE, SHM)), ("cuda", (SHM,)), ("cpu", (SHM,))])
def test_a_pair_on_two_devices_goes_directly_between_npus_only(device: str, expected: tuple[str, ...]) -> None:
    assert transports_between("auto", device, colocated=False) == expected


@pytest.mark.parametrize("colocated", [False, True])
def test_what_is_asked_for_is_what_is_offered(colocated: bool) -> None:
    assert transports_between("mooncake", "npu", colocated=colocated) == (MOONCAKE,)
    assert transports_between("shm", "npu", colocated=colocated) == (SHM,)


def test_the_names_are_those_of_the_transports() -> None:
    assert (ShmReceiveSide.name, MooncakeReceiveSide.name) == (SHM, MOONCAKE)


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_between_nodes_there_is_mooncake_alone(device: str) -> None:
    assert transports_between("auto", device, colocated=False, same_node=False) == (MOONCAKE,)


@pytest.mark.parametrize(
    ("device", "expected"), [("npu", (MOONCAKE, SHM)), ("cuda", (SHM, MOONCAKE)), ("cpu", (SHM, MOONCAKE))]
)
def test_as_long_as_nobody_knows_the_node_of_the_other_both_are_tried(device: str, expected: tuple[str, ...]) -> None:
    assert transports_between("auto", device, colocated=False, same_node=None) == expected


@pytest.mark.parametrize("asked", ["auto", "shm"])
def test_no_worker_of_another_node_gets_in_by_shared_memory(asked: str) -> None:
    why = why_not(SHM, asked, "cpu", here="b", there="a")
    assert "one node" in why and "a there" in why and "b here" in why
    assert why_not(SHM, asked, "cpu", here="b", there="b") == ""


@pytest.mark.parametrize(
    ("device", "there", "refused"), [("cpu", "a", False), ("cpu", "b", True), ("npu", "a", False), ("npu", "b", False)]
)
def test_nobody_writes_one_sidedly_where_blocks_are_not_kept_for_it(device: str, there: str, refused: bool) -> None:
    assert bool(why_not(MOONCAKE, "auto", device, here="b", there=there)) is refused


def test_a_report_names_the_nodes_where_they_are_two() -> None:
    assert (between("a", "a"), between("a", "b")) == ("", "from node a to node b")
