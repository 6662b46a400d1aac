"""`python -m tests.soak.neighbours`: what it gives to know who shares a device, by emulation of stages that take turns.

The policies over layouts in which E shares its device, and over one encoder alone for two PD, at the rates of the
committed comparison of layouts. A device is a core: times are round numbers near those of the `bench` preset. Emulated,
so it says which policy is better where stages take turns, and not by how much it is on any machine.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from bench.micro.measurement import Goal
from epd_serve.layout_parser import parse
from tests.soak.emulation.deployment import emulate
from tests.soak.emulation.device import StageDevice
from tests.soak.emulation.openpangu_vl_7b_910b import DEVICE
from tests.soak.harness import Result, Soak
from tests.soak.table5 import Load

CORE = replace(
    DEVICE,
    name="a core",
    encode_s_per_token=0.25 / 667,
    prefill_s_per_token=0.2 / 500,
    decode_s=0.011,
    decode_s_per_sequence=0.0006,
    front_s=0.05,
    handover_s=0.01,
    handover_s_per_token=0.0,
    encode_slows_prefill=2.0,
    encode_slows_decode=2.0,
    prefill_slows_decode=2.0,
    max_running=64,
)
LAYOUTS: Mapping[str, tuple[StageDevice, tuple[float, ...]]] = {
    "(E-PD)x2": (CORE, (0.4, 0.8, 1.2)),
    "(E-PD)-PD": (CORE, (0.4, 0.8, 1.2)),
    "(E-P)-(E-D)": (CORE, (0.8, 1.2)),
    "(E-PD)x2-PD": (CORE, (1.2, 1.8)),
    "2E-2PD": (CORE, (1.0, 1.6)),
    "(E-PD)x2 on NPUs": (DEVICE, (8.0, 16.0)),
}
POLICIES = ("least-loaded", "first-token")
SEEDS, QUICK_SEEDS = 8, 2
COUNT = 200


def measure(arguments: argparse.Namespace) -> Result:
    seeds = range(QUICK_SEEDS if arguments.quick else SEEDS)
    rows = [
        {"layout": layout, "rate_rps": rate, "policy": policy, "seed": seed}
        | served(layout, device, rate, policy, seed)
        for layout, (device, rates) in LAYOUTS.items()
        for rate, policy, seed in itertools.product(rates, POLICIES, seeds)
    ]
    return figures(rows), rows, ""


def served(layout: str, device: StageDevice, rate_rps: float, policy: str, seed: int) -> dict[str, float]:
    run = emulate(parse(layout.partition(" ")[0]), device, Load(COUNT).at(rate_rps, seed), "emulated", policy)
    ttft_s = [row.ttft_s for row in run.rows if row.ttft_s is not None]
    tpot_s = [row.tpot_s for row in run.rows if row.tpot_s is not None]
    return {"ttft_ms": round(1e3 * fmean(ttft_s), 1), "tpot_ms": round(1e3 * fmean(tpot_s), 2)}


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the seeds, and by how much the second policy's are of the first one's."""
    means: dict[str, float] = {}
    for (layout, rate), policy in itertools.product(
        dict.fromkeys((row["layout"], row["rate_rps"]) for row in rows), POLICIES
    ):
        own = [row for row in rows if (row["layout"], row["rate_rps"], row["policy"]) == (layout, rate, policy)]
        for kind in ("ttft_ms", "tpot_ms"):
            means[f"{layout}/{rate:g}/{policy}/{kind}"] = round(fmean(row[kind] for row in own), 2)
            if policy == POLICIES[1]:
                mine, other = (means[f"{layout}/{rate:g}/{name}/{kind}"] for name in reversed(POLICIES))
                means[f"{layout}/{rate:g}/{kind}_ratio"] = round(mine / other, 4)
    return means


SOAK = Soak(
    "neighbours",
    "policies over layouts whose stages share devices, emulated",
    measure,
    (
        *(Goal(f"(E-PD)x2/{rate}/ttft_ms_ratio", "<=", 0.95) for rate in ("0.4", "0.8", "1.2")),
        Goal("(E-PD)x2/1.2/tpot_ms_ratio", "<=", 1.0),
        Goal("2E-2PD/1.6/ttft_ms_ratio", "==", 1.0, "nothing is shared"),
        Goal("(E-PD)x2 on NPUs/8/ttft_ms_ratio", "<=", 1.02, "they hardly feel each other there"),
    ),
    kind="emulated, virtual clock",
)

if __name__ == "__main__":
    raise SystemExit(SOAK.main())
