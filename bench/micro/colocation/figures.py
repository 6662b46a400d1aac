"""From rounds of layouts and storms to the figures of `epd-bench colocation`. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from bench.micro.measurement import Row
from bench.micro.rows import grouped, median, quartiles, ratios
from bench.statistic import Spread

SHARES = "E=0.5,PD=0.5"
TP1, E_PD, E_PD_SHARES, EP_D, E_P_D = "TP1", "(E-PD)", f"(E-PD) {SHARES}", "EP-D", "(E-P)-D"
AGAINST = {
    "E_PD_over_TP1": (E_PD, TP1),
    "E_PD_with_core_share_over_TP1": (E_PD_SHARES, TP1),
    "E_P_D_over_EP_D": (E_P_D, EP_D),
}
"""How two layouts that are held against each other are called in the figures."""
STORMS = {
    "tpot_under_encode_storm_shares_over_none": "storm_tpot_ms",
    "tpot_solo_shares_over_none": "solo_tpot_ms",
    "storm_encodes_shares_over_none": "encodes_per_s",
}
"""What the shares themselves cost and bring, in the same round."""
LAYOUT_FIGURES = {
    "tokens_per_s": "tput",
    "tpot_ms": "tpot",
    "ttft_ms": "ttft",
    "cpu_s": "cpu_s",
    "cores_of_others": "cores_of_others",
}
"""Of each layout: the name in its figures, and what of a round it is the median of."""


def rounds_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """By layout, its rounds with what they are compared by: `tput`, mean `tpot` and `ttft` in ms, `cores_of_others`."""
    rounds = [
        {
            **row,
            "tput": row["tokens_per_s"],
            "tpot": float(np.mean(row["tpot_ms"])),
            "ttft": float(np.mean(row["ttft_ms"])),
            "cores_of_others": row["others_cpu_s"] / row["seconds"],
        }
        for row in rows
        if "tokens_per_s" in row
    ]
    return {name: own for (name,), own in grouped(rounds, "layout").items()}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`tput_E_PD_over_TP1` with `_p25` and `_p75`, each layout's medians, `tpot_under_encode_storm_over_solo`,
    `…_with_core_share`, and what the shares themselves cost."""
    named: dict[str, float] = {
        f"same_tokens/{row['layout']}": row["same_tokens"] for row in rows if "same_tokens" in row
    }
    rounds = rounds_of(rows)
    for (figure, (of, over)), value in itertools.product(AGAINST.items(), ("tput", "tpot", "ttft")):
        if (ratio := ratios(rounds.get(of, []), rounds.get(over, []), value)) is not None:
            named |= quartiles(f"{value}_{figure}", ratio)
    for (layout, own), (name, value) in itertools.product(rounds.items(), LAYOUT_FIGURES.items()):
        named[f"{layout}/{name}"] = round(median(own, value), 4)
    storms = {name: own for (name,), own in grouped((row for row in rows if "storm" in row), "layout").items()}
    for layout, suffix in ((E_PD, ""), (E_PD_SHARES, "_with_core_share")):
        if own := storms.get(layout, []):
            spread = Spread.of([row["storm_tpot_ms"] / row["solo_tpot_ms"] for row in own])
            named |= quartiles(f"tpot_under_encode_storm_over_solo{suffix}", spread)
            named |= {f"{layout}/{name}": round(median(own, name), 3) for name in ("solo_tpot_ms", "storm_tpot_ms")}
            named[f"{layout}/storm_encodes_per_s"] = round(median(own, "encodes_per_s"), 3)
    for figure, value in STORMS.items():
        if (ratio := ratios(storms.get(E_PD_SHARES, []), storms.get(E_PD, []), value)) is not None:
            named |= quartiles(figure, ratio)
    return named
