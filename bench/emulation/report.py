"""What an emulation of Table 5 found, as text for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bench.emulation.agreement import Agreement, Table
from bench.emulation.printed import Said
from bench.emulation.sensitivity import Varied
from bench.emulation.table5 import METRICS, PRINTED
from deploy.placement_table import table

WORDS = {
    "total": "10 req/s for each layout, as the caption says",
    "implied": "the requests a second that each printed row implies",
    "monoliths": "10 req/s for each layout, but 10 per device for the two of which a device is a whole one",
}


def implied_table() -> str:
    """How many requests a second Table 5's rows imply."""
    rows: list[tuple[str, ...]] = [("layout", "devices", "attainment", "tokens/s/device", "⇒ req/s", "⇒ per device")]
    for name, row in PRINTED.items():
        implied = row.implied_rps
        attained, throughput = f"{row.attainment:.2%}", f"{row.per_device:.2f}"
        rows.append((name, str(row.devices), attained, throughput, f"{implied:.2f}", f"{implied / row.devices:.2f}"))
    return table(rows)


def reading_table(reading: str, emulated: Table, rates: dict[str, float], found: Agreement) -> str:
    """One reading: emulated beside printed, and the correlations."""
    head = ("layout", "req/s", *(f"{metric} (printed)" for metric in METRICS.values()))
    rows: list[tuple[str, ...]] = [head]
    for name, row in emulated.items():
        cells = (f"{_short(getattr(row, one))} ({_short(getattr(PRINTED[name], one))})" for one in METRICS)
        rows.append((name, f"{rates[name]:.1f}", *cells))
    for words, values in (("Spearman", found.spearman), ("Kendall", found.kendall), ("by chance", found.by_chance)):
        rows.append((words, "", *(f"{values[metric]:+.3f}" for metric in METRICS)))
    lines = [f"{reading}: {WORDS[reading]}", table(rows)]
    for metric, pairs in found.flipped.items():
        if pairs:
            said = ", ".join(f"{one} above {other}" for one, other in pairs)
            lines.append(f"against the print, {METRICS[metric]}: {said}")
    return "\n".join(lines)


def said_table(numbers: Sequence[Said]) -> str:
    rows: list[tuple[str, ...]] = [("", "printed", "emulated", "", "where")]
    for one in numbers:
        printed = f"{one.low:g}" if one.low == one.high else f"{one.low:g} to {one.high:g}"
        rows.append((one.name, printed, f"{one.emulated:.1f}", "used" if one.used else "", one.source))
    return table(rows)


def sensitivity_table(varied: Sequence[Varied]) -> str:
    """Variations that change an order; the rest is counted."""
    rows: list[tuple[str, ...]] = [
        ("variation", "rank correlation", "pairs that turn (effective throughput per device)")
    ]
    for one in varied:
        if one.turned:
            pairs = ", ".join(f"{low} > {high}" for low, high in one.turned)
            rows.append((one.variation.name, f"{one.correlation:+.3f}", pairs))
    still = sum(not one.turned for one in varied)
    return f"{table(rows)}\n{still} of {len(varied)} variations turn no pair"


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"
