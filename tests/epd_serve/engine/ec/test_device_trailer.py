"""A trailer vouches for its feature: what is cut, mixed up, stale or flipped is corrupt, on every kind of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.engine.ec.device_trailer import TRAILER_BYTES, FeatureShape, Integrity, sampled
from npu_ops.fake.device import FakeDevice
from npu_ops.memory import DeviceMemory
from npu_ops.torch_memory import HostMemory
from store.errors import CorruptFeatureError, StoreError

ROWS, WIDTH = 100, 3584


def memories() -> dict[str, DeviceMemory]:
    return {"bytes": HostMemory(), "samples and words": FakeDevice(), "samples": FakeDevice(sums=False)}


@pytest.fixture(params=["bytes", "samples and words", "samples"])
def memory(request: pytest.FixtureRequest) -> DeviceMemory:
    made = memories()[request.param]
    made.enter_thread()
    return made


def sealed(memory: DeviceMemory, key: str = "k", seed: int = 0) -> torch.Tensor:
    feature = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    flat = feature.view(torch.uint8).reshape(-1)
    block = memory.allocate(flat.numel() + TRAILER_BYTES)
    memory.copy(block.data[: flat.numel()], flat)
    Integrity(memory).seal(key, block.data, FeatureShape.of(feature), "e1")
    memory.fence()()
    return block.data


def test_a_feature_comes_out_as_it_went_in(memory: DeviceMemory) -> None:
    object_ = sealed(memory)
    shape = Integrity(memory).verify("k", object_, writer="e1")
    assert shape == FeatureShape((ROWS, WIDTH), "bfloat16")
    assert shape.read(object_[:-TRAILER_BYTES]).shape == (ROWS, WIDTH)


@pytest.mark.parametrize("part", ["first byte", "last byte", "trailer", "middle third", "last 1/64", "all stale"])
def test_what_goes_wrong_with_transfers_is_found_by_every_memory(memory: DeviceMemory, part: str) -> None:
    object_, stale = sealed(memory), sealed(memory, seed=1)
    end = object_.numel() - TRAILER_BYTES
    ranges = {
        "first byte": (0, 1),
        "last byte": (end - 1, end),
        "trailer": (end + 40, end + 48),
        "middle third": (end // 3, 2 * end // 3),
        "last 1/64": (end - end // 64, end),
        "all stale": (0, end),
    }
    start, stop = ranges[part]
    object_[start:stop] = stale[start:stop] ^ 1 if part != "all stale" else stale[start:stop]
    with pytest.raises(CorruptFeatureError):
        Integrity(memory).verify("k", object_)


@given(position=st.integers(0, ROWS * WIDTH * 2 - 1), bit=st.integers(0, 7))
@settings(max_examples=10, deadline=None)
@pytest.mark.parametrize("method", ["bytes", "samples and words"])
def test_any_single_flipped_bit_is_found_where_the_device_sums(method: str, position: int, bit: int) -> None:
    memory = memories()[method]
    memory.enter_thread()
    object_ = sealed(memory)
    object_[position] ^= 1 << bit
    assert Integrity(memory).method == method
    with pytest.raises(CorruptFeatureError):
        Integrity(memory).verify("k", object_)


def test_another_features_bytes_under_a_key_are_corrupt(memory: DeviceMemory) -> None:
    with pytest.raises(CorruptFeatureError, match="another feature"):
        Integrity(memory).verify("k", sealed(memory, key="other"))


def test_an_object_of_another_size_is_corrupt(memory: DeviceMemory) -> None:
    with pytest.raises(CorruptFeatureError):
        Integrity(memory).verify("k", sealed(memory)[2:])
    with pytest.raises(CorruptFeatureError, match="less than"):
        Integrity(memory).verify("k", sealed(memory)[:TRAILER_BYTES])


def test_a_probe_must_come_from_the_life_that_is_probed(memory: DeviceMemory) -> None:
    with pytest.raises(CorruptFeatureError, match="another life"):
        Integrity(memory).verify("k", sealed(memory), writer="e2")


def test_a_shape_that_does_not_fit_is_refused_before_it_travels() -> None:
    memory = HostMemory()
    with pytest.raises(StoreError, match="does not fit"):
        Integrity(memory).seal("k", memory.allocate(512).data, FeatureShape((1,) * 9, "uint8"), "e")


@given(st.integers(1, 200_000))
def test_samples_are_few_and_include_both_ends(nbytes: int) -> None:
    windows, last = sampled(torch.arange(nbytes, dtype=torch.int32))
    assert windows.numel() <= 16 << 10 and last.numel() <= 64
    assert windows.reshape(-1)[0] == 0 and last[-1] == nbytes - 1
