"""From rows of requests to the figures and tables of `epd-bench ttft`. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.micro.measurement import Row
from bench.micro.rows import grouped, median, quartiles, ratios, spread, table_of
from bench.record import flatten
from bench.statistic import percentile


@dataclass(frozen=True)
class Variant:
    """The mechanism without one part: what it does instead, its figure, and the flags that take the part away."""

    name: str
    figure: str
    flags: tuple[str, ...]


WHOLE = "event, metadata, arena"
VARIANTS = {
    "event": Variant("fetched on demand", "ttft_demand_over_event", ("--feature-prefetch", "demand")),
    "metadata": Variant("pixels to P and D", "ttft_pixels_over_metadata", ("--send-pixels", "always")),
    "arena": Variant("through Mooncake", "ttft_mooncake_over_arena", ("--mm-store", "mooncake")),
}

PARTS = {
    "groups_ms": "group",
    "phases_ms": "phase",
    "hidden_ms": "between two stamps, hidden or not",
    "cpu_ms": "CPU of the whole request",
}
"""Where a request's time went: name in a row, and heading."""


def summary(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Per target: median, quartile, p90 and mean of the TTFT, its ratio to the first target, mean per phase.

    Means add up; a row without a phase spent nothing in it.
    """
    found: dict[str, dict[str, Any]] = {}
    for (name,), own in grouped(rows, "target").items():
        ttft = [row["ttft_ms"] for row in own]
        found[name] = {
            "median_ms": median(own, "ttft_ms"),
            "p25_ms": percentile(ttft, 25),
            "p90_ms": percentile(ttft, 90),
            "mean_ms": float(np.mean(ttft)),
            **({} if own[0]["right"] is None else {"right": float(np.mean([row["right"] for row in own]))}),
            "residual_ms": float(np.mean([row["residual_ms"] for row in own])),
            **{part: _means([row[part] for row in own]) for part in PARTS},
        }
    first = next(iter(found.values()))["median_ms"]
    return {name: {**one, "ratio": one["median_ms"] / first} for name, one in found.items()}


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row.get(name, 0.0) for row in rows])) for name in names}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`unique/TP1/median_ms`, `…/ratio`, `…/phases_ms/…`, `idle_cpu_share/…`; of `--mechanism` a ratio per variant."""
    pairs = grouped((row for row in rows if "compared" in row and "target" in row), "compared")
    found: dict[str, float] = {}
    for variant in VARIANTS.values():
        if pair := pairs.get((variant.name,)):
            without, whole_one = ([row for row in pair if row["target"] == name] for name in (variant.name, WHOLE))
            ratio = ratios(without, whole_one, "ttft_ms", "turn")
            found |= quartiles(variant.figure, ratio, 15) if ratio else {}
            found[f"{variant.figure}/without_ms"] = median(without, "ttft_ms")
            found[f"{variant.figure}/whole_ms"] = median(whole_one, "ttft_ms")
    if pairs:
        return found
    idle = {name: share for row in rows for name, share in row.get("idle_cpu_share", {}).items()}
    modes = grouped((row for row in rows if "target" in row), "mode")
    return flatten({"idle_cpu_share": idle, **{mode: summary(own) for (mode,), own in modes.items()}})


def tables(rows: Sequence[Row]) -> Iterable[str]:
    """Per mode or variant: TTFT per target, then where each target's time went; of variants also the ratios."""
    asked = [row for row in rows if "target" in row]
    for (mode, compared), own in grouped([{"compared": "", **row} for row in asked], "mode", "compared").items():
        found = summary(own)
        yield table_of(
            [{"right": float("nan"), **one, "name": name} for name, one in found.items()],
            {
                " ".join(filter(None, (mode, compared))): "{name}",
                **{f"{name} ms": f"{{{name}_ms:.1f}}" for name in ("median", "p25", "p90", "mean")},
                "ratio": "{ratio:.2f}",
                "right answers": "{right:.0%}",
            },
        )
        for (name, one), (part, heading) in itertools.product(found.items(), PARTS.items()):
            if len(one[part]) > 1:
                more = {"residual": one["residual_ms"]} if part == "phases_ms" else {}
                columns = {f"{name}: {heading}": "{0[0]}", "mean ms": "{0[1]:.1f}"}
                yield table_of({**one[part], **more}.items(), columns)
    if not any("compared" in row for row in asked):
        idle = {name: share for row in rows for name, share in row.get("idle_cpu_share", {}).items()}
        yield table_of(idle.items(), {"idle": "{0[0]}", "share of a core": "{0[1]:.3f}"})
        return
    by = grouped(asked, "compared", "target")
    yield table_of(
        [
            {
                "name": name,
                "of": spread(by[name, name], "ttft_ms"),
                "over": spread(by[name, WHOLE], "ttft_ms"),
                "ratio": ratios(by[name, name], by[name, WHOLE], "ttft_ms", "turn"),
            }
            for name in dict.fromkeys(row["compared"] for row in asked)
        ],
        {
            "without": "{name}",
            "TTFT ms": "{of:.1f}",
            "whole mechanism ms": "{over:.1f}",
            "ratio of pairs": "{ratio:.2f}",
        },
    )
