"""Measurements of `epd-bench` that take a device as they are."""

from __future__ import annotations

from tests.npu.rig import Rig

CPU_OPERATORS = "encoder_matmul,decode_matmul,memory_copy"  # all of them take minutes
LIMIT_S = 220.0


def transfer_pd(rig: Rig) -> None:
    """P→D by mode of grouping, both stages on the card; its figures at 8B's proportions are the part `exposed`'s."""
    lengths, rounds = ("256", "1") if rig.card.kind == "cpu" else ("1024,2048,4096", "6")
    words = ("transfer", "pd", "--device", rig.card.kind, "--preset", "npu", "--lengths", lengths, "--rounds", rounds)
    words += ("--transports", "shm", "--concurrency", "1", "--modes", "bulk,layerwise,adaptive", "--quick")
    with rig.layout("P-D"):
        found = rig.bench(*words, name="transfer-pd", limit_s=LIMIT_S)
        for name, value in found["figures"].items():
            if name.startswith(("real_", "cuda_", "npu_")):
                rig.row(name, round(value, 4))


def interference(rig: Rig) -> None:
    """Fig. 6's map. Core shares are the part `shares`'."""
    words = ["interference", "--device", rig.card.kind, "--rounds", "1", "--seconds", "0.3"]
    words += ["--operators", CPU_OPERATORS] if rig.card.kind == "cpu" else []
    found = rig.bench(*words, name="interference", limit_s=LIMIT_S)
    for name, value in found["figures"].items():
        rig.row(name, round(value, 4))
