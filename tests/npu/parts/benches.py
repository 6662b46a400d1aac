"""Measurements of `epd-bench` that take a device as they are."""

from __future__ import annotations

from bench.micro.pd import one_gpu
from bench.micro.pd.figures import cell_table, cells
from epd_serve.demo.decoder_layers import DecoderShape
from npu_ops.torch_memory import open_memory
from tests.npu.rig import Rig, Skipped

MODES = ("bulk", "layerwise", "adaptive")
SMALL = DecoderShape(layers=8, hidden=128, ffn=256, heads=4, kv_heads=2, head_dim=32)
CPU_OPERATORS = "encoder_matmul,decode_matmul,memory_copy"  # all of them take minutes
LIMIT_S = 220.0


def transfer_pd(rig: Rig) -> None:
    """The sender on a GPU's streams against layers of an 8B model's shape; on CPU the same code, small."""
    if rig.card.kind == "npu":
        raise Skipped("epd-bench transfer pd measures GPUs: its layers are CUDA's")
    if rig.card.kind == "cpu":
        found = cells(one_gpu.measure(SMALL, "cpu", open_memory("cpu"), (64, 256), MODES, 2))
        print(cell_table(found))
        figures = {f"{cell.transport} {cell.tokens} {cell.mode}": cell.measures for cell in found}
        for name, measures in figures.items():
            rig.row(name, {what: round(spread.median, 4) for what, spread in measures.items()})
        return
    words = ("transfer", "pd", "--device", rig.card.kind, "--lengths", "1024,2048,4096", "--rounds", "6")
    found = rig.bench(*words, "--modes", ",".join(MODES), name="transfer-pd", limit_s=LIMIT_S)
    for name, value in found["figures"].items():
        rig.row(name, round(value, 4))


def interference(rig: Rig) -> None:
    """Fig. 6's map. Core shares are the part `shares`'."""
    words = ["interference", "--device", rig.card.kind, "--rounds", "1", "--seconds", "0.3"]
    words += ["--operators", CPU_OPERATORS] if rig.card.kind == "cpu" else []
    found = rig.bench(*words, name="interference", limit_s=LIMIT_S)
    for name, value in found["figures"].items():
        rig.row(name, round(value, 4))
