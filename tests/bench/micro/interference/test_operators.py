"""The operators of the interference profile: what each computes and moves, and what that says about its needs."""

from __future__ import annotations

import dataclasses

import pytest

from bench.micro.interference.operators import BENCH, EIGHT_B, default_sizes, needs, operators, shares_of_best
from bench.micro.interference.run import Runner, call_of

SMALL = dataclasses.replace(
    BENCH, encoder_tokens=8, prompt_tokens=8, context=16, decode_layers=2, copy_bytes=4096, reduce_bytes=4096
)


def test_a_cpu_has_one_copy_and_an_all_reduce_between_its_virtual_devices():
    names = list(operators("cpu", 1, BENCH))

    assert "memory_copy" in names and "all_reduce" in names
    assert not {"copy_to_device", "copy_to_host"} & set(names)


def test_an_all_reduce_takes_two_accelerators():
    assert "all_reduce" not in operators("npu", 1, EIGHT_B)
    assert "all_reduce" in operators("npu", 2, EIGHT_B)
    assert {"copy_to_device", "copy_to_host"} <= set(operators("cuda", 1, EIGHT_B))


@pytest.mark.parametrize(("kind", "element"), [("cpu", 4), ("npu", 2)])
def test_what_a_matmul_computes_and_moves(kind: str, element: int) -> None:
    one = operators(kind, 1, BENCH)["encoder_matmul"]

    assert one.flops == 2 * 1600 * 256 * 1024
    assert one.moved_bytes == element * (1600 * 256 + 256 * 1024 + 1600 * 1024)


def test_decode_moves_more_bytes_than_a_cache_holds():
    for sizes, cache_bytes in ((BENCH, 32 << 20), (EIGHT_B, 192 << 20)):
        every = operators("npu", 1, sizes)
        assert every["decode_attention"].moved_bytes > cache_bytes
        assert every["decode_matmul"].moved_bytes > cache_bytes


@pytest.mark.parametrize("kind", ["cpu", "npu"])
def test_prefill_computes_more_per_byte_than_decode(kind):
    every = operators(kind, 1, default_sizes(kind))

    assert every["prefill_matmul"].intensity > 10 * every["decode_matmul"].intensity
    assert every["prefill_attention"].intensity > 10 * every["decode_attention"].intensity


def test_needs_follow_from_the_best_that_any_operator_reaches():
    every = operators("npu", 2, EIGHT_B)
    alone_s = {
        name: max(one.flops / 300e12, one.moved_bytes / (50e9 if one.link else 1.6e12)) for name, one in every.items()
    }

    found = needs(every, alone_s)

    assert {found["encoder_matmul"], found["prefill_matmul"], found["prefill_attention"]} == {"compute"}
    assert {found["decode_matmul"], found["decode_attention"], found["norm"], found["elementwise"]} == {"memory"}
    assert {found["copy_to_device"], found["copy_to_host"], found["all_reduce"]} == {"link"}
    assert shares_of_best(every, alone_s)["prefill_matmul"][0] == pytest.approx(1.0)


def test_a_copy_computes_nothing_even_where_nothing_else_was_measured():
    every = {"memory_copy": operators("cpu", 1, BENCH)["memory_copy"]}

    assert needs(every, {"memory_copy": 0.01}) == {"memory_copy": "memory"}


def test_every_operator_of_a_cpu_runs_and_is_timed():
    every = operators("cpu", 1, SMALL)
    runner = Runner("cpu", 0, SMALL)
    for name in every:
        if name != "all_reduce":  # a process more: `test_interference_process`
            assert runner.prepare(name).repeats >= 1
            (begun, ended), *_ = runner.run(name, 0.0, 0.0)
            assert ended > begun


def test_an_unknown_operator_is_an_error():
    import torch

    with pytest.raises(ValueError, match="no operator 'sort'"):
        call_of("sort", SMALL, torch.device("cpu"))
