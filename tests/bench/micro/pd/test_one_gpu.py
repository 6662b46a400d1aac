"""The harness of `epd-bench transfer pd --device cuda`, on CPU with small sizes: there was no GPU to run it on."""

from __future__ import annotations

import itertools

import pytest

from bench.cli import main
from bench.micro.pd import one_gpu
from bench.micro.pd.copy_side import CopySendSide
from bench.micro.pd.figures import figures
from epd_serve.demo.decoder_layers import DecoderLayers, DecoderShape, kv_caches
from epd_serve.errors import StageError
from npu_ops.torch_memory import HostMemory

SMALL = DecoderShape(layers=4, hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8)


def test_every_mode_takes_its_turn_on_every_path_with_its_own_packets():
    modes = ("bulk", "layerwise", "fixed:2", "adaptive")

    rows = list(one_gpu.measure(SMALL, "cpu", HostMemory(), (40,), modes, 1))

    assert {(row["transport"], row["mode"]) for row in rows} == set(itertools.product(one_gpu.PATHS, modes))
    groups = {row["mode"]: tuple(row["groups"]) for row in rows}
    assert groups == {"bulk": (4,), "layerwise": (1,) * 4, "fixed:2": (2, 2), "adaptive": (4,)}  # below the floor
    for row in rows:
        (step,) = row["timeline_ms"]["steps"]
        assert len(step) == SMALL.layers + 2 and step == sorted(step)
        assert row["bytes"] == 3 * 16 * SMALL.layers * 2 * 2 * 8 * 2  # blocks of 16 tokens; K and V, 2 heads
    assert "cuda_overlap_40_adaptive_device" in figures(rows)


def test_bytes_that_do_not_arrive_are_no_measurement(monkeypatch):
    whole = CopySendSide.move

    def forgetful(self, packet, send, receive):
        moved = whole(self, packet, send, receive)
        self._target[packet.last - 1][0].blocks(0, 1).zero_()
        return moved

    monkeypatch.setattr(CopySendSide, "move", forgetful)

    with pytest.raises(StageError, match="bulk, 16 tokens: D's blocks differ from P's"):
        list(one_gpu.measure(SMALL, "cpu", HostMemory(), (16,), ("bulk",), 1))


def test_layers_write_the_kv_of_the_prompt_and_of_nothing_else():
    caches = kv_caches(SMALL, blocks=4, block_size=16, kind="cpu")
    seen = []

    DecoderLayers(SMALL, caches, "cpu").prefill(20, range(1, 3), lambda: seen.append(len(seen)))

    assert seen == [0, 1, 2, 3]
    for cache in caches.values():
        slots = cache.flatten(1, 2)  # [K or V, slot, head, value]
        assert slots[:, 16:36].flatten(2).any(dim=-1).all()
        assert not slots[:, :16].any() and not slots[:, 36:].any()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--device cuda: torch finds no CUDA device; without a GPU, leave --device away"),
        ("--transports shm", "--transports is for stages"),
        ("--concurrency 2", "--concurrency is for stages"),
    ],
)
def test_without_a_gpu_it_says_so(monkeypatch, capsys, flags, message):
    monkeypatch.setattr(one_gpu, "cuda_missing", lambda: "torch finds no CUDA device")

    assert main(["transfer", "pd", "--device", "cuda", *flags.split()]) == 1
    assert message in capsys.readouterr().err


def test_with_a_gpu_the_table_says_what_is_real(monkeypatch, capsys, tmp_path):
    asked = []

    def measure_gpu(*what):
        asked.append(what)
        yield from one_gpu.measure(SMALL, "cpu", HostMemory(), (16,), ("bulk",), 1)

    monkeypatch.setattr(one_gpu, "measure_gpu", measure_gpu)

    flags = f"--device cuda --quick --modes bulk --json {tmp_path / 'r'}"
    assert main(["transfer", "pd", *flags.split()]) == 0
    assert asked == [((256, 1024, 2048), ("bulk",), 4)]
    printed = capsys.readouterr().out
    assert "layers of an 8B model, no vLLM" in printed and "emulated" not in printed
    assert "cuda_exposed_ms_bulk_16_device" in (tmp_path / "r").read_text()
