"""Emulated P→D transfers: EPD-Serve's Table 4 and Table 2 in shape, and the group-size policy against every fixed size.

Nothing runs here but the policy: time is that of `bench/devices/atlas_800i_a2.py`, a virtual clock
(`bench/pd_emulation_pair.py`). The figures check that the policy is right; no win may be claimed from them.

    Definitions (design §6): KV latency is the total time of the packets on the link, exposed = max(0, DONE - end of
    prefill) of the request that waits longest, overlap = 1 - exposed / KV latency.

    "layerwise, late" is the paper's baseline as its rows read: a packet per layer and request, none before the last
    layer begins. The line of the link is solved from the 1024-token rows, so KV latencies there are reproduced, not
    found. When sends begin was read off both rows. Everything else at 2048 tokens, all that is exposed, and all of our
    own modes are predictions.
    "layerwise" is this system's mode: a packet per layer, shared by the requests of the step, at once.

    Sensitivity: setup per packet, bandwidth and compute time each 30 % less and more, and what the paper leaves open:
    36 layers instead of 34, KV that leaves before the layer's MLP, a setup for each request in a packet. A tenth of the
    bandwidth is no reading of the paper: there the link is slower than the compute, and sizes are harder to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from bench.devices import atlas_800i_a2 as paper
from bench.devices.device import Device
from bench.goals import Goal
from bench.pd_emulation_pair import Arrival, Mode, Pair, Served
from bench.pd_emulation_tables import (
    ADAPTIVE_NAME,
    BULK_NAME,
    LATE_NAME,
    SOURCED,
    Compared,
    Row,
    best_fixed_table,
    kv_over_bulk,
    modes_table,
    one,
    sensitivity_table,
    table_2,
    table_4,
)
from epd_serve.kv.grouping import FixedGrouping, parse_grouping

LENGTHS = (256, 512, 1024, 2048, 4096)
CONCURRENCIES = (1, paper.CONCURRENCY)
FLOOR_BYTES = 1 << 20  # the default of `--kv-packet-floor-kib`
STEP_TOKENS = 8192  # where prompts are chunked or come one by one
CHUNKED_TOKENS = 3000  # no divisor of the step: steps end some prompts and leave one unfinished
SEED = 1

MODES = tuple(
    Mode(name, parse_grouping(name, FLOOR_BYTES))
    for name in (BULK_NAME, "layerwise", "fixed:2", "fixed:4", "fixed:8", ADAPTIVE_NAME)
)
ADAPTIVE = MODES[-1]
LATE = Mode(LATE_NAME, FixedGrouping(1, "layerwise"), False, paper.BASELINE_BEGINS_WITH_LAYER)

GOALS = (
    Goal("exposed_adaptive_over_best_fixed_worst", "<=", 1.05, "no fixed size, at no length, exposes 5 % less"),
    Goal("kv_ms_adaptive_over_bulk_256", "<=", 1.02, "what hides costs the link no more than 2 %"),
)

DEVICE = paper.DEVICE
VARIATIONS: dict[str, Device] = {
    SOURCED: DEVICE,
    "setup -30%": DEVICE.scaled(setup=0.7),
    "setup +30%": DEVICE.scaled(setup=1.3),
    "bandwidth -30%": DEVICE.scaled(bandwidth=0.7),
    "bandwidth +30%": DEVICE.scaled(bandwidth=1.3),
    "compute -30%": DEVICE.scaled(compute=0.7),
    "compute +30%": DEVICE.scaled(compute=1.3),
    "36 layers": replace(DEVICE.scaled(compute=paper.LAYERS / paper.LAYERS_QWEN3), layers=paper.LAYERS_QWEN3),
    "KV leaves before the MLP": replace(DEVICE, tail=paper.TAIL_AFTER_ATTENTION),
    "setup per request": replace(DEVICE, setup_s_per_part=DEVICE.setup_s),
    "a tenth of the bandwidth": DEVICE.scaled(bandwidth=0.1),
}
THIRTY = [name for name in VARIATIONS if name.endswith("30%")]


def run_emulation(quick: bool) -> tuple[dict[str, float], list[Row], list[str]]:
    """Figures, raw rows and printable tables. `quick` leaves the sensitivity out."""
    variations = {SOURCED: DEVICE} if quick else VARIATIONS
    rows = [row for name, device in variations.items() for row in _measured(name, device)]
    compared = {name: list(_against_every_fixed_size(device)) for name, device in variations.items()}
    chunked = list(_chunked())
    served = [row for name in (SOURCED, *([] if quick else THIRTY)) for row in _ttft(name)]
    figures = _figures(rows, compared)
    tables = [
        modes_table("modes, one step per batch", [row for row in rows if row["device"] == SOURCED]),
        modes_table(f"modes, prompts in steps of {STEP_TOKENS} tokens", chunked),
        table_4(rows),
        best_fixed_table(compared[SOURCED]),
        table_2(served),
    ]
    if not quick:
        figures |= _sensitivity_figures(compared)
        tables.append(sensitivity_table(rows, compared))
    figures |= {f"emu_ttft_change_{row['rate']:g}": row["ttft_change"] for row in served if row["device"] == SOURCED}
    return figures, [*rows, *chunked, *served], [f"emulated, {DEVICE.name}: {text}" for text in tables]


def _at_once(tokens: int, concurrency: int) -> list[Arrival]:
    return [Arrival(0.0, tokens)] * concurrency


def _pair(device: Device, mode: Mode) -> Pair:
    """An adaptive pair has met every length and concurrency once, so that its lines are those of a warm system."""
    pair = Pair(device, mode)
    if mode is ADAPTIVE:
        for tokens in LENGTHS:
            for concurrency in CONCURRENCIES:
                pair.serve(_at_once(tokens, concurrency))
    return pair


def _measured(variation: str, device: Device) -> list[Row]:
    rows = []
    for mode in (*MODES, replace(LATE, begins_with_layer=device.layers)):
        pair = _pair(device, mode)
        for tokens in LENGTHS:
            for concurrency in CONCURRENCIES:
                served = pair.serve(_at_once(tokens, concurrency))
                rows.append(_row(variation, mode.name, tokens, concurrency, served))
    return rows


def _row(variation: str, mode: str, tokens: int, concurrency: int, served: Served) -> Row:
    exposed_s = max(one.exposed_s for one in served.outcomes)
    return {
        "kind": "emulated",
        "device": variation,
        "mode": mode,
        "tokens": tokens,
        "concurrency": concurrency,
        "packets": len(served.moved),
        "kv_ms": served.kv_s * 1e3,
        "exposed_ms": exposed_s * 1e3,
        "prefill_ms": served.prefill_s * 1e3,
        "overlap": 1.0 - exposed_s / served.kv_s,
        "gb_per_s": sum(one.packet.nbytes for one in served.moved) / served.kv_s / 1e9,
    }


def _chunked() -> Iterator[Row]:
    """Prompts longer than their share of a step: most chunks have others of their prompt after them."""
    for mode in MODES:
        pair = Pair(DEVICE, mode, STEP_TOKENS)
        pair.serve(_at_once(CHUNKED_TOKENS, paper.CONCURRENCY))  # adaptive learns the device
        served = pair.serve(_at_once(CHUNKED_TOKENS, paper.CONCURRENCY))
        yield _row(f"{SOURCED}, steps of {STEP_TOKENS} tokens", mode.name, CHUNKED_TOKENS, paper.CONCURRENCY, served)


def _against_every_fixed_size(device: Device) -> list[Compared]:
    adaptive = _pair(device, ADAPTIVE)
    fixed = {size: Pair(device, Mode("", FixedGrouping(size, f"fixed:{size}"))) for size in range(1, device.layers + 1)}
    found = []
    for tokens in LENGTHS:
        for concurrency in CONCURRENCIES:
            arrivals = _at_once(tokens, concurrency)
            exposed = {size: pair.serve(arrivals).outcomes[-1].exposed_s for size, pair in fixed.items()}
            best = min(exposed, key=lambda size: exposed[size])
            ours = adaptive.serve(arrivals).outcomes[-1].exposed_s
            found.append(Compared(tokens, concurrency, ours, exposed[best], best))
    return found


def _ttft(variation: str) -> list[Row]:
    """Table 2 in shape: the paper's baseline TTFT less what the emulation exposes less, mean of its 512 requests."""
    device, rows = VARIATIONS[variation], []
    for printed in paper.TABLE_2:
        chance, at_s, arrivals = Random(SEED), 0.0, []
        for _ in range(paper.TABLE_2_REQUESTS):
            at_s += chance.expovariate(printed.requests_per_s)
            arrivals.append(Arrival(at_s, paper.TABLE_2_PROMPT_TOKENS))
        exposed_ms = {}
        for mode in (replace(LATE, begins_with_layer=device.layers), ADAPTIVE):
            outcomes = Pair(device, mode, STEP_TOKENS).serve(arrivals).outcomes
            exposed_ms[mode.name] = sum(one.exposed_s for one in outcomes) / len(outcomes) * 1e3
        ttft_ms = printed.baseline_ttft_ms - exposed_ms[LATE.name] + exposed_ms[ADAPTIVE.name]
        rows.append(
            {
                "kind": "emulated exposed time, the paper's baseline TTFT",
                "device": variation,
                "rate": printed.requests_per_s,
                "load": printed.requests_per_s * device.layers * device.layer_s([(0, paper.TABLE_2_PROMPT_TOKENS)]),
                "baseline_exposed_ms": exposed_ms[LATE.name],
                "adaptive_exposed_ms": exposed_ms[ADAPTIVE.name],
                "baseline_ttft_ms": printed.baseline_ttft_ms,
                "ttft_ms": ttft_ms,
                "ttft_change": ttft_ms / printed.baseline_ttft_ms - 1,
                "paper_ttft_change": printed.grouped_ttft_ms / printed.baseline_ttft_ms - 1,
            }
        )
    return rows


def _figures(rows: Sequence[Row], compared: dict[str, list[Compared]]) -> dict[str, float]:
    return {
        "emu_overlap_1024_layerwise": one(rows, LATE.name, 1024)["overlap"],
        "emu_overlap_2048_layerwise": one(rows, LATE.name, 2048)["overlap"],
        "emu_overlap_1024_layerwise_at_once": one(rows, "layerwise", 1024)["overlap"],
        "emu_overlap_1024_adaptive": one(rows, ADAPTIVE.name, 1024)["overlap"],
        "emu_overlap_2048_adaptive": one(rows, ADAPTIVE.name, 2048)["overlap"],
        "exposed_adaptive_over_best_fixed_worst": max(found.ratio for found in compared[SOURCED]),
        "kv_ms_adaptive_over_bulk_256": kv_over_bulk(rows, SOURCED),
    }


def _sensitivity_figures(compared: dict[str, list[Compared]]) -> dict[str, float]:
    worst = {name: max(one.ratio for one in found) for name, found in compared.items()}
    return {
        "exposed_adaptive_over_best_fixed_worst_30%": max(worst[name] for name in THIRTY),
        "exposed_adaptive_over_best_fixed_worst_open": max(worst[name] for name in worst if name not in THIRTY),
    }
