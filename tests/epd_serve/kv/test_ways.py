"""Which transports a pair may take, by device and by whether it shares one."""

from __future__ import annotations

import pytest

from epd_serve.engine.kv.mooncake_receive import MooncakeReceiveSide
from epd_serve.engine.kv.shm_receive import ShmReceiveSide
from epd_serve.kv.ways import MOONCAKE, SHM, transports_between


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_a_pair_on_one_device_meets_in_shared_memory(device: str) -> None:
    assert transports_between("auto", device, beside=True) == (SHM,)


@pytest.mark.parametrize(("device", "expected"), [("npu", (MOONCAKE, SHM)), ("cuda", (SHM,)), ("cpu", (SHM,))])
def test_a_pair_on_two_devices_goes_directly_between_npus_only(device: str, expected: tuple[str, ...]) -> None:
    assert transports_between("auto", device, beside=False) == expected


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_asked_for_is_what_is_offered(beside: bool) -> None:
    assert transports_between("mooncake", "npu", beside=beside) == (MOONCAKE,)
    assert transports_between("shm", "npu", beside=beside) == (SHM,)


def test_the_names_are_those_of_the_transports() -> None:
    assert (ShmReceiveSide.name, MooncakeReceiveSide.name) == (SHM, MOONCAKE)
