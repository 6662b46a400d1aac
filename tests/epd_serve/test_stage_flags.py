"""Flags of a stage, read as vLLM reads them."""

from __future__ import annotations

import pytest

from epd_serve.stage_flags import GIB, read_stage_flags


def test_the_last_flag_wins_however_it_is_written() -> None:
    words = ("--max-model-len", "4096", "--max_model_len=8k", "--gpu-memory-utilization", "0.5")
    flags = read_stage_flags(words, "npu", 64 * GIB)
    assert (flags.max_model_len, flags.utilization) == (8000, 0.5)
    assert read_stage_flags(("--max-model-len=8K",), "npu", 64 * GIB).max_model_len == 8192


@pytest.mark.parametrize(
    ("device", "gib", "tp", "step"),
    [
        ("cpu", 24, 1, (2048, 128)),
        ("cpu", 24, 2, (4096, 256)),
        ("npu", 64, 1, (2048, 256)),
        ("cuda", 80, 1, (8192, 1024)),
        ("cuda", 180, 1, (16384, 1024)),
    ],
)
def test_a_step_is_as_large_as_vllm_makes_it_on_such_a_device(
    device: str, gib: int, tp: int, step: tuple[int, int]
) -> None:
    flags = read_stage_flags((), device, gib * GIB, tp)
    assert (flags.max_num_batched_tokens, flags.max_num_seqs) == step


def test_eight_bit_caches_take_half() -> None:
    assert read_stage_flags(("--kv-cache-dtype", "fp8_e4m3"), "npu", 64 * GIB).kv_element_bytes == 1
    assert read_stage_flags(("--dtype", "float32"), "npu", 64 * GIB).kv_element_bytes == 4
    assert read_stage_flags((), "npu", 64 * GIB).kv_element_bytes == 2


def test_a_length_that_vllm_fits_itself_is_known_as_such() -> None:
    for word in ("auto", "-1"):
        flags = read_stage_flags(("--max-model-len", word), "npu", 64 * GIB)
        assert flags.fitted_len and flags.max_model_len is None


def test_switches_can_be_taken_back() -> None:
    assert read_stage_flags(("--enforce-eager",), "npu", 64 * GIB).eager
    assert not read_stage_flags(("--enforce-eager", "--no-enforce-eager"), "npu", 64 * GIB).eager


def test_processor_options_come_whole_or_key_by_key() -> None:
    words = ("--mm-processor-kwargs", '{"max_pixels": 100}', "--mm-processor-kwargs.min_pixels", "4")
    assert read_stage_flags(words, "npu", 64 * GIB).processor_kwargs == {"max_pixels": 100, "min_pixels": 4}


def test_nonsense_is_left_to_vllm() -> None:
    words = ("--max-model-len", "many", "--gpu-memory-utilization", "7", "--mm-processor-kwargs", "{", "--max-num-seqs")
    flags = read_stage_flags(words, "npu", 64 * GIB)
    assert flags.max_model_len is None and flags.utilization is None and flags.processor_kwargs == {}
