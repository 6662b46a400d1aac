"""Emulated P→D transfers: EPD-Serve's Table 4 in shape, and the group-size policy against every fixed size.

One step that prefills all requests of a row, and one link: what decides is the stages' own policy, and when its packets
arrive follows from the constants of `tests/epd_serve/kv/atlas_800i_a2.py` (`epd_serve.kv.grouping.finish_s`). Nothing
runs. The figures check that the policy is right; no win may be claimed from them.

    Definitions: KV latency is the total time of the packets on the link, exposed = max(0, DONE - end of prefill),
    overlap = 1 - exposed / KV latency.

    "layerwise, late" is the paper's baseline as its rows read: a packet per layer and request, none before the last
    layer begins. The line of the link is solved from the 1024-token rows, so KV latencies there are reproduced, not
    found. When sends begin was read off both rows. Everything else at 2048 tokens, all that is exposed, and all of our
    own modes are predictions.
    "layerwise" is this system's mode: a packet per layer, shared by the requests of the step, at once.

    Sensitivity: setup per packet, bandwidth and compute time each 30 % less and more, and what the paper leaves open
    (`VARIATIONS` of the device).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from epd_serve.kv.grouping import Cuts, FixedGrouping, LinkCost, Step, exposed_s, parse_grouping
from tests.epd_serve.kv.atlas_800i_a2 import SOURCED
from tests.epd_serve.kv.device_pair import DevicePair
from tests.soak.emulation.printed import TABLE_4_CONCURRENCY

LENGTHS = (256, 512, 1024, 2048, 4096)
CONCURRENCIES = (1, TABLE_4_CONCURRENCY)
FLOOR_BYTES = 1 << 20  # the default of `--kv-packet-floor-kib`
MODES = {
    name: parse_grouping(name, FLOOR_BYTES)
    for name in ("bulk", "layerwise", "fixed:2", "fixed:4", "fixed:8", "adaptive")
}
LATE, ADAPTIVE = "layerwise, late", "adaptive"

Row = dict[str, Any]


def figures(rows: Sequence[Row], devices: Iterable[str] = (SOURCED,)) -> dict[str, float]:
    """Overlap of the paper's baseline and of our modes at 1024 and 2048 tokens; how adaptive groups compare."""
    return {
        "overlap_1024_layerwise": row_of(rows, LATE, 1024)["overlap"],
        "overlap_2048_layerwise": row_of(rows, LATE, 2048)["overlap"],
        "overlap_1024_adaptive": row_of(rows, ADAPTIVE, 1024)["overlap"],
        "overlap_2048_adaptive": row_of(rows, ADAPTIVE, 2048)["overlap"],
        "exposed_adaptive_over_best_fixed_worst": worst(rows, devices),
        "kv_ms_adaptive_over_bulk_256": _kv_over_bulk(rows, SOURCED),
    }


def device_rows(variation: str, device: DevicePair) -> Iterator[Row]:
    """Every mode at every length and concurrency, each held against the best of all fixed sizes."""
    for concurrency, tokens in product(CONCURRENCIES, LENGTHS):
        step, cost = device.step(tokens, concurrency), device.link(concurrency)
        case: Row = {"kind": "emulated", "device": variation, "tokens": tokens, "concurrency": concurrency}
        best_s, best = _best_fixed(step, cost)
        for mode, grouping in MODES.items():
            row = case | {"mode": mode} | _transfer(grouping.cuts(step, cost), step, cost)
            ratio = row["exposed_ms"] / (best_s * 1e3) if best_s else math.inf if row["exposed_ms"] else 1.0
            yield row | {"best_fixed": best, "best_fixed_ms": best_s * 1e3, "over_best_fixed": ratio}
        # Late: of each layer a packet of each request, and a link that is taken until the last layer begins.
        each = device.link(1)
        late = replace(step, backlog_s=(device.layers - 1) * step.layer_s + step.slack_s)
        layers = MODES["layerwise"].cuts(step, each)
        row = _transfer(layers, late, replace(each, setup_s=each.setup_s * concurrency))
        yield case | {"mode": LATE} | row | {"packets": len(layers) * concurrency}


def _transfer(cuts: Cuts, step: Step, cost: LinkCost) -> Row:
    exposed, kv_s = exposed_s(cuts, step, cost), len(cuts) * cost.setup_s + cost.s_per_byte * _bytes(step)
    return {
        "packets": len(cuts),
        "kv_ms": kv_s * 1e3,
        "exposed_ms": exposed * 1e3,
        "prefill_ms": step.layers * step.layer_s * 1e3,
        "overlap": 1.0 - exposed / kv_s,
        "gb_per_s": _bytes(step) / kv_s / 1e9,
    }


def _bytes(step: Step) -> int:
    return step.layers * step.layer_bytes


def _best_fixed(step: Step, cost: LinkCost) -> tuple[float, int]:
    """(seconds exposed, layers in a packet) of the best size of 1 … L layers (L is bulk)."""
    sizes = (FixedGrouping(layers, "") for layers in range(1, step.layers + 1))
    return min((exposed_s(size.cuts(step, cost), step, cost), size.layers_per_packet) for size in sizes)


def row_of(rows: Sequence[Row], mode: str, tokens: int, device: str = SOURCED) -> Row:
    """Returns the row of that mode and length at the paper's concurrency."""
    wanted = (device, mode, tokens, TABLE_4_CONCURRENCY)
    (row,) = (row for row in rows if (row["device"], row["mode"], row["tokens"], row["concurrency"]) == wanted)
    return row


def worst(rows: Sequence[Row], devices: Iterable[str]) -> float:
    names = set(devices)
    return max(float(row["over_best_fixed"]) for row in rows if row["mode"] == ADAPTIVE and row["device"] in names)


def _kv_over_bulk(rows: Sequence[Row], device: str) -> float:
    """How much longer 256-token prompts keep the link busy when they are grouped adaptively."""
    adaptive, bulk = (row_of(rows, mode, 256, device)["kv_ms"] for mode in (ADAPTIVE, "bulk"))
    return float(adaptive / bulk)


# --- tables -------------------------------------------------------------------------------------------------------
