"""EPD-Serve's Table 2, and what else of the transfers can be taken away: switches of `epd-serve serve`. Pure.

The baseline of Table 2 is the paper's: a feature is fetched when a request needs it, and KV is sent as a whole when its
prompt is computed (§3.3, "synchronous transmission"), so all of its transfer is exposed; of the paper's own baseline
85 % is (Table 4). `layerwise` is a row that the paper lacks: KV layer by layer at once, which hides most of it already.

Beside Table 2 each part of the way from E to P is taken away alone from all of it: the announcement of features, the
metadata that P and D get instead of pixels, prefill that begins before the last image is encoded, the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.analysis.ratios import Ratio, Sample, sample_ratio
from bench.micro.measurement import Row
from bench.micro.rows import grouped, table_of

MACHINE = "openPangu-7B-VL, Atlas 800I A2, ShareGPT-4o, 2 and 3 requests/s"


class Table2Row(NamedTuple):
    """E-P-D with some of its optimisations, as printed: milliseconds at 2 and 3 requests a second and NPU (§4.1)."""

    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]


TABLE_2: Mapping[str, Table2Row] = {
    "baseline": Table2Row((703.75, 880.22), (39.29, 42.39)),
    "prefetch": Table2Row((586.87, 688.86), (38.36, 41.5)),
    "grouped": Table2Row((590.80, 775.83), (39.42, 43.89)),
    "both": Table2Row((481.38, 650.51), (38.20, 43.95)),
}

CANNOT = """\
What this can show here: what each switch costs or saves per request, on an engine that is hardly loaded. What it
cannot: a net gain from overlap. Two CPU cores do the computing and the copying; a transfer that hides behind a layer
takes that layer's core. The paper's gains come from copy engines and links that work beside the computing units."""


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    Attributes:
        name: as in figures, and in the paper's table. title: as the paper calls it.
        prefetch, grouping: `--feature-prefetch` and `--kv-grouping` of `epd-serve serve`. more: other flags of it.
        of_all: its base is not the paper's baseline, but all of the mechanism.
    """

    name: str
    title: str
    prefetch: str = "event"
    grouping: str = "adaptive"
    more: tuple[str, ...] = ()
    of_all: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Also where they are the default, so that results name them."""
        return ("--feature-prefetch", self.prefetch, "--kv-grouping", self.grouping, *self.more)

    @property
    def paper(self) -> str:
        """The change of the TTFT that the paper has, at 2 and at 3 requests a second."""
        if self.name not in TABLE_2:
            return "-"
        pairs = zip(TABLE_2[self.name].ttft_ms, TABLE_2["baseline"].ttft_ms, strict=True)
        return ", ".join(f"{of / base - 1:+.1%}" for of, base in pairs)


BASELINE = Variant("baseline", "Baseline (E-P-D)", "demand", "bulk")
WHOLE = Variant("whole", "all of the mechanism")
TABLE = (
    Variant("layerwise", "w/ P-D layer by layer", "demand", "layerwise"),
    Variant("prefetch", "w/ E-P asynchronous prefetching", "event", "bulk"),
    Variant("grouped", "w/ P-D hierarchically grouped", "demand", "adaptive"),
    Variant("both", "EPD-Serve (both)", "event", "adaptive"),
)
VARIANTS = {
    one.name: one
    for one in (
        *TABLE,
        Variant("demand", "fetched on demand", "demand", of_all=True),
        Variant("pixels", "pixels to P and D", more=("--send-pixels", "always"), of_all=True),
        Variant("all-images", "prefill waits for all images", more=("--partial-prefill", "off"), of_all=True),
        Variant("mooncake", "through Mooncake", more=("--mm-store", "mooncake"), of_all=True),
    )
}


def whole(row: Row) -> bool:
    """Both have answered it."""
    return None not in (row["ttft_ms"], row["baseline_ttft_ms"])


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Returns `RATE rps/VARIANT/ttft_ms`, `baseline_ttft_ms`, `ttft_over_baseline` with `_low`, `_high`; TPOT likewise.

    Means over the requests that both answered whole; intervals (95 %) over pairs in blocks of neighbours. And
    `VARIANT/whole`: the share of its requests that were.

    Args:
        rows: one of each request, sent to the base and to a variant in the same round: `variant`, `rate_rps`, `round`,
            `n`, and `ttft_ms`, `tpot_ms`, `baseline_ttft_ms`, `baseline_tpot_ms`, each None without a whole answer.
    """
    results: dict[str, float] = {}
    for (rate, variant), own in grouped(rows, "rate_rps", "variant").items():
        prefix = f"{rate:g} rps/{variant}"
        results[f"{prefix}/requests"] = len(own)
        results[f"{prefix}/not_whole"] = sum(not whole(row) for row in own)
        for kind, found in _changes(own).items():
            results |= {f"{prefix}/baseline_{kind}_ms": round(found.a, 3), f"{prefix}/{kind}_ms": round(found.b, 3)}
            ends = {"": found.ratio, "_low": found.low, "_high": found.high}
            over = {f"{prefix}/{kind}_over_baseline{end}": value for end, value in ends.items()}
            results |= {name: round(value, 4) for name, value in over.items() if value is not None}
    for (variant,), own in grouped(rows, "variant").items():
        results[f"{variant}/whole"] = sum(map(whole, own)) / len(own)
    return results


def _changes(rows: Sequence[Row]) -> dict[str, Ratio]:
    """Of TTFT and TPOT, the variant over the baseline."""
    found = {}
    for kind in ("ttft", "tpot"):
        pairs = [(row[f"baseline_{kind}_ms"], row[f"{kind}_ms"]) for row in rows]
        values = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
        if values[:, 0].any():  # simulated answers may come all at once
            found[kind] = sample_ratio(f"{kind}_ms", Sample(values[:, 0]), Sample(values[:, 1]), paired=True)
    return found


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the table: ours, and what the paper reports of its machine beside it."""
    lines = [
        {"rate": rate, "requests": len(own), "ttft": None, "tpot": None, **_changes(own), "of": VARIANTS[variant]}
        for (rate, variant), own in grouped(
            sorted(rows, key=lambda row: row["rate_rps"]), "rate_rps", "variant"
        ).items()
    ]
    columns: dict[str, str | Callable[[Row], object]] = {
        "requests/s": "{rate:g}",
        "": "{of.title}",
        "requests": "{requests}",
        "TTFT ms": "{ttft.b:.1f}",
        "baseline": "{ttft.a:.1f}",
        "change (95 %)": lambda line: _change(line["ttft"]),
        "TPOT ms": lambda line: f"{line['tpot'].b:.2f}" if line["tpot"] else "-",
        "TPOT: change": lambda line: _change(line["tpot"]),
        "paper": "{of.paper}",
    }
    yield table_of([line for line in lines if line["ttft"]], columns)
    yield f"Each row beside its base in its own rounds; paper: its change of TTFT against its baseline, {MACHINE}"
    yield CANNOT


def _change(found: Ratio | None) -> str:
    """`-12.3% (-15.0 to -9.1)`, or that no difference shows."""
    if found is None or found.ratio is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.ratio - 1:+.1%} ({found.why})"
    ends = f"{100 * (found.low - 1):+.1f} to {100 * (found.high - 1):+.1f}"
    return f"{found.ratio - 1:+.1%} ({ends}{', no difference shown' if found.verdict == 'no difference shown' else ''})"
