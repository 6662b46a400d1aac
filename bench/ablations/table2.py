"""EPD-Serve's Table 2: E-P-D with and without its two transfer optimisations, as switches of ours, and what it reports.

Pure. The paper's baseline fetches features when they are needed and sends KV layer by layer (§4.2.2 calls layer-wise
the baseline; `--ungrouped bulk` takes §3.3's synchronous transmission instead: all of it when the prompt is computed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.compare.bootstrap import LEAST, draw, interval, share
from deploy.placement_table import table

LAYOUT = "E-P-D"
UNGROUPED = ("layerwise", "bulk")
RESAMPLES = 2000


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    Attributes:
        name: as in figures. title: as the paper calls it. prefetch, grouped: what is switched on.
        paper_ttft, paper_tpot: milliseconds at 2 and at 3 requests a second on its machine.
    """

    name: str
    title: str
    prefetch: bool
    grouped: bool
    paper_ttft: tuple[float, float]
    paper_tpot: tuple[float, float]

    def flags(self, ungrouped: str) -> tuple[str, ...]:
        """Of `epd-serve serve`. Both are said also where they are the default, so that results name them."""
        prefetch = "event" if self.prefetch else "demand"
        grouping = "adaptive" if self.grouped else ungrouped
        return ("--feature-prefetch", prefetch, "--kv-grouping", grouping)


BASELINE = Variant("baseline", "Baseline (E-P-D)", False, False, (703.75, 880.22), (39.29, 42.39))
VARIANTS = (
    Variant("prefetch", "w/ E-P asynchronous prefetching", True, False, (586.87, 688.86), (38.36, 41.5)),
    Variant("grouped", "w/ P-D hierarchically grouped", False, True, (590.80, 775.83), (39.42, 43.89)),
    Variant("both", "EPD-Serve (both)", True, True, (481.38, 650.51), (38.20, 43.95)),
)
PAPER_RATES = (2, 3)
PAPER_MACHINE = "openPangu-7B-VL, Atlas 800I A2, ShareGPT-4o, 2 and 3 requests/s"


@dataclass(frozen=True)
class Asked:
    """One request, asked of the baseline and of a variant in the same round. None: no whole answer.

    Attributes:
        rate_rps, round, n: which it was.
        ttft_ms, tpot_ms: (baseline, variant).
    """

    variant: str
    rate_rps: float
    round: int
    n: int
    ttft_ms: tuple[float | None, float | None]
    tpot_ms: tuple[float | None, float | None]

    def row(self) -> dict[str, object]:
        return {
            "variant": self.variant,
            "rate_rps": self.rate_rps,
            "round": self.round,
            "n": self.n,
            "baseline_ttft_ms": self.ttft_ms[0],
            "ttft_ms": self.ttft_ms[1],
            "baseline_tpot_ms": self.tpot_ms[0],
            "tpot_ms": self.tpot_ms[1],
        }


def figures(asked: Sequence[Asked], seed: int = 0) -> dict[str, float]:
    """`RATE rps/VARIANT/ttft_ms`, `…/baseline_ttft_ms`, `…/ttft_over_baseline` with `_low` and `_high`; TPOT likewise.

    Means over the requests that both answered whole; intervals (95 %) over pairs in blocks of neighbours.
    """
    found: dict[str, float] = {}
    for rate, variant in dict.fromkeys((one.rate_rps, one.variant) for one in asked):
        own = [one for one in asked if (one.rate_rps, one.variant) == (rate, variant)]
        prefix = f"{rate:g} rps/{variant}"
        found[f"{prefix}/requests"] = len(own)
        found[f"{prefix}/not_whole"] = sum(None in one.ttft_ms for one in own)
        for kind in ("ttft", "tpot"):
            pairs = [getattr(one, f"{kind}_ms") for one in own if None not in getattr(one, f"{kind}_ms")]
            if not pairs:
                continue
            base, with_it = (np.asarray(side, dtype=np.float64) for side in zip(*pairs, strict=True))
            if not base.mean() > 0:
                continue  # simulated answers may come all at once
            found[f"{prefix}/baseline_{kind}_ms"] = round(float(base.mean()), 3)
            found[f"{prefix}/{kind}_ms"] = round(float(with_it.mean()), 3)
            found[f"{prefix}/{kind}_over_baseline"] = round(float(with_it.mean() / base.mean()), 4)
            if len(pairs) < LEAST:
                continue
            weights, ones = draw(len(pairs), RESAMPLES, seed), np.ones(len(pairs))
            drawn = interval(share(weights, with_it, ones), share(weights, base, ones))
            if drawn is not None:
                low, high = drawn
                found |= {
                    f"{prefix}/{kind}_over_baseline_{end}": round(at, 4)
                    for end, at in zip(("low", "high"), (low, high), strict=True)
                }
    return found


def shown(found: Mapping[str, float], kind: str) -> str:
    """The table of each rate: ours, and what the paper reports of its machine beside it."""
    parts = []
    for rate in dict.fromkeys(name.split("/")[0] for name in found):
        rows: list[tuple[str, ...]] = [
            (rate, "requests", "TTFT ms", "baseline", "change (95 %)", "TPOT ms", "change (95 %)", "paper's TTFT")
        ]
        for one in VARIANTS:
            prefix = f"{rate}/{one.name}"
            if f"{prefix}/ttft_ms" not in found:
                continue
            rows.append(
                (
                    one.title,
                    f"{found[f'{prefix}/requests']:.0f}",
                    f"{found[f'{prefix}/ttft_ms']:.1f}",
                    f"{found[f'{prefix}/baseline_ttft_ms']:.1f}",
                    _change(found, f"{prefix}/ttft_over_baseline"),
                    f"{found[f'{prefix}/tpot_ms']:.2f}" if f"{prefix}/tpot_ms" in found else "-",
                    _change(found, f"{prefix}/tpot_over_baseline"),
                    ", ".join(
                        f"{of / base - 1:+.1%}" for of, base in zip(one.paper_ttft, BASELINE.paper_ttft, strict=True)
                    ),
                )
            )
        if len(rows) > 1:
            parts.append(table(rows))
    return f"{kind}; each row beside the baseline of its own rounds\n\n" + "\n\n".join(parts)


def _change(found: Mapping[str, float], name: str) -> str:
    """`-12.3% (-15.0 to -9.1)`, or that no difference shows."""
    if name not in found:
        return "-"
    text = f"{found[name] - 1:+.1%}"
    if f"{name}_low" not in found:
        return f"{text} (too few)"
    low, high = found[f"{name}_low"] - 1, found[f"{name}_high"] - 1
    none = ", no difference shown" if low <= 0 <= high else ""
    return f"{text} ({low * 100:+.1f} to {high * 100:+.1f}{none})"
