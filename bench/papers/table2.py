"""EPD-Serve's Table 2: E-P-D with and without its two transfer optimisations, as flags of ours. Pure.

The baseline is the paper's: a feature is fetched when a request needs it, and KV is sent as a whole when its prompt is
computed (§3.3, "synchronous transmission"), so all of its transfer is exposed; of the paper's own baseline 85 % is
(Table 4). `layerwise` is a row that the paper lacks: KV layer by layer at once, which hides most of it already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from bench.analysis.ratios import LEAST, Sample, ratio_interval
from bench.papers.printed import MACHINE, TABLE_2
from deploy.placement_table import table

LAYOUT = "E-P-D"
CANNOT = """\
What this can show here: what each switch costs or saves per request, on an engine that is hardly loaded. What it
cannot: a net gain from overlap. Two CPU cores do the computing and the copying; a transfer that hides behind a layer
takes that layer's core. The paper's gains come from copy engines and links that work beside the computing units."""


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    Attributes:
        name: as in figures, and in the paper's table. title: as the paper calls it.
        prefetch, grouping: `--feature-prefetch` and `--kv-grouping` of `epd-serve serve`.
    """

    name: str
    title: str
    prefetch: str
    grouping: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Both, also where they are the default, so that results name them."""
        return ("--feature-prefetch", self.prefetch, "--kv-grouping", self.grouping)

    @property
    def paper(self) -> str:
        """The change of the TTFT that the paper has, at 2 and at 3 requests a second."""
        if self.name not in TABLE_2:
            return "-"
        pairs = zip(TABLE_2[self.name].ttft_ms, TABLE_2["baseline"].ttft_ms, strict=True)
        return ", ".join(f"{of / base - 1:+.1%}" for of, base in pairs)


BASELINE = Variant("baseline", "Baseline (E-P-D)", "demand", "bulk")
VARIANTS = (
    Variant("layerwise", "w/ P-D layer by layer", "demand", "layerwise"),
    Variant("prefetch", "w/ E-P asynchronous prefetching", "event", "bulk"),
    Variant("grouped", "w/ P-D hierarchically grouped", "demand", "adaptive"),
    Variant("both", "EPD-Serve (both)", "event", "adaptive"),
)

Row = dict[str, Any]
"""One request, sent to the baseline and to a variant in the same round: `variant`, `rate_rps`, `round`, `n`, and
`ttft_ms`, `tpot_ms`, `baseline_ttft_ms`, `baseline_tpot_ms`, each None without a whole answer."""


def whole(row: Row) -> bool:
    """Both have answered it."""
    return None not in (row["ttft_ms"], row["baseline_ttft_ms"])


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Returns `RATE rps/VARIANT/ttft_ms`, `baseline_ttft_ms`, `ttft_over_baseline` with `_low`, `_high`; TPOT likewise.

    Means over the requests that both answered whole; intervals (95 %) over pairs in blocks of neighbours. And
    `VARIANT/whole`: the share of its requests that were.
    """
    results: dict[str, float] = {}
    names = [one.name for one in VARIANTS]
    ordered = sorted(rows, key=lambda row: (row["rate_rps"], names.index(row["variant"])))
    for (rate, variant), group in groupby(ordered, key=lambda row: (row["rate_rps"], row["variant"])):
        own, prefix = list(group), f"{rate:g} rps/{variant}"
        results[f"{prefix}/requests"] = len(own)
        results[f"{prefix}/not_whole"] = sum(not whole(row) for row in own)
        for kind in ("ttft", "tpot"):
            pairs = [(row[f"{kind}_ms"], row[f"baseline_{kind}_ms"]) for row in own]
            values = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
            results |= {f"{prefix}/{name}": value for name, value in _compared(kind, values)}
    of_variants = ([row for row in rows if row["variant"] == name] for name in names)
    return results | {f"{own[0]['variant']}/whole": sum(map(whole, own)) / len(own) for own in of_variants if own}


def _compared(kind: str, pairs: np.typing.NDArray[np.float64]) -> Iterator[tuple[str, float]]:
    """`pairs`: [requests, (variant, baseline)]."""
    if not len(pairs) or not pairs[:, 1].any():
        return  # simulated answers may come all at once
    with_it, base = pairs.mean(axis=0)
    yield f"baseline_{kind}_ms", round(float(base), 3)
    yield f"{kind}_ms", round(float(with_it), 3)
    yield f"{kind}_over_baseline", round(float(with_it / base), 4)
    if len(pairs) >= LEAST:
        drawn = ratio_interval(Sample(pairs[:, 0]), Sample(pairs[:, 1]), paired=True)
        for end, value in zip(("low", "high"), drawn or (), strict=False):
            yield f"{kind}_over_baseline_{end}", round(value, 4)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the table of each rate: ours, and what the paper reports of its machine beside it."""
    results = figures(rows)
    head = ("requests", "TTFT ms", "baseline", "change (95 %)", "TPOT ms", "change (95 %)", "paper's TTFT")
    for rate in dict.fromkeys(row["rate_rps"] for row in rows):
        lines = [(f"{rate:g} rps", *head)]
        for one in VARIANTS:
            prefix = f"{rate:g} rps/{one.name}/"
            own = {name.removeprefix(prefix): value for name, value in results.items() if name.startswith(prefix)}
            if "ttft_ms" in own:
                ttft, tpot = (f"{own['ttft_ms']:.1f}", f"{own['baseline_ttft_ms']:.1f}"), f"{own.get('tpot_ms', 0):.2f}"
                changes = _change(own, "ttft"), _change(own, "tpot")
                lines.append((one.title, f"{own['requests']:.0f}", *ttft, changes[0], tpot, changes[1], one.paper))
        yield table(lines)
    yield f"each row beside the baseline of its own rounds; paper's: its change against its baseline, {MACHINE}"
    yield CANNOT


def _change(own: Mapping[str, float], kind: str) -> str:
    """`-12.3% (-15.0 to -9.1)`, or that no difference shows."""
    name = f"{kind}_over_baseline"
    if name not in own:
        return "-"
    if f"{name}_low" not in own:
        return f"{own[name] - 1:+.1%} (too few)"
    low, high = (100 * (own[f"{name}_{end}"] - 1) for end in ("low", "high"))
    return f"{own[name] - 1:+.1%} ({low:+.1f} to {high:+.1f}{', no difference shown' if low <= 0 <= high else ''})"
