"""The harness of `epd-bench transfer pd --device cuda`, on CPU with small sizes: there was no GPU to run it on."""

from __future__ import annotations

import itertools

import pytest

from bench import pd_cuda
from bench.cli import main
from bench.pd_copy_side import CopySendSide
from bench.transfer_pd_figures import cells, figures
from epd_serve.demo.decoder_layers import EIGHT_B, DecoderLayers, DecoderShape, kv_caches
from epd_serve.errors import StageError
from npu_ops.torch_memory import HostMemory

SMALL = DecoderShape(layers=4, hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8)


def test_every_mode_takes_its_turn_on_every_path_with_its_own_packets():
    modes = ("bulk", "layerwise", "fixed:2", "adaptive")

    samples = pd_cuda.measure(SMALL, "cpu", HostMemory(), (40,), modes, 1)

    assert {(one.case.transport, one.mode) for one in samples} == set(itertools.product(pd_cuda.PATHS, modes))
    groups = {one.mode: one.transfer.groups for one in samples}
    assert groups == {"bulk": (4,), "layerwise": (1,) * 4, "fixed:2": (2, 2), "adaptive": (4,)}  # below the floor
    for one in samples:
        (step,) = one.transfer.steps
        assert len(step.layers) == SMALL.layers
        assert [step.begun, *step.layers, step.ended] == sorted([step.begun, *step.layers, step.ended])
        assert one.transfer.nbytes == 3 * 16 * SMALL.layers * 2 * 2 * 8 * 2  # blocks of 16 tokens; K and V, 2 heads
    assert "cuda_overlap_40_adaptive_device" in figures(cells(samples, modes), "cuda")


def test_bytes_that_do_not_arrive_are_no_measurement(monkeypatch):
    whole = CopySendSide.move

    def forgetful(self, packet, send, receive):
        moved = whole(self, packet, send, receive)
        self._target[packet.last - 1][0].blocks(0, 1).zero_()
        return moved

    monkeypatch.setattr(CopySendSide, "move", forgetful)

    with pytest.raises(StageError, match="bulk, 16 tokens: D's blocks differ from P's"):
        pd_cuda.measure(SMALL, "cpu", HostMemory(), (16,), ("bulk",), 1)


def test_layers_write_the_kv_of_the_prompt_and_of_nothing_else():
    caches = kv_caches(SMALL, blocks=4, block_size=16, kind="cpu")
    seen = []

    DecoderLayers(SMALL, caches, "cpu").prefill(20, range(1, 3), lambda: seen.append(len(seen)))

    assert seen == [0, 1, 2, 3]
    for cache in caches.values():
        slots = cache.flatten(1, 2)  # [K or V, slot, head, value]
        assert slots[:, 16:36].flatten(2).any(dim=-1).all()
        assert not slots[:, :16].any() and not slots[:, 36:].any()


def test_the_shape_is_that_of_an_8b_model():
    assert (EIGHT_B.layers, EIGHT_B.hidden, EIGHT_B.ffn) == (32, 4096, 14336)
    assert (EIGHT_B.kv_heads, EIGHT_B.head_dim) == (8, 128)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--device cuda: torch finds no CUDA device; without a GPU, leave --device away"),
        ("--transports shm", "--transports is for stages"),
        ("--concurrency 2", "--concurrency is for stages"),
    ],
)
def test_without_a_gpu_it_says_so(monkeypatch, capsys, flags, message):
    monkeypatch.setattr(pd_cuda, "cuda_missing", lambda: "torch finds no CUDA device")

    assert main(["transfer", "pd", "--device", "cuda", *flags.split()]) == 1
    assert message in capsys.readouterr().err


def test_with_a_gpu_the_table_says_what_is_real(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(pd_cuda, "gpu", lambda: "a card")
    asked = []

    def measure_gpu(*what):
        asked.append(what)
        return pd_cuda.measure(SMALL, "cpu", HostMemory(), (16,), ("bulk",), 1)

    monkeypatch.setattr(pd_cuda, "measure_gpu", measure_gpu)

    flags = f"--device cuda --quick --modes bulk --json {tmp_path / 'r'}"
    assert main(["transfer", "pd", *flags.split()]) == 0
    assert asked == [((256, 1024, 2048), ("bulk",), 4)]
    shown = capsys.readouterr().out
    assert "real: a card to host, layers of an 8B model, no vLLM" in shown and "emulated" not in shown
    assert "cuda_exposed_ms_bulk_16_device" in (tmp_path / "r").read_text()
