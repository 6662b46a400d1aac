"""What AISBench's runs found, as text: our figures with AISBench's own beside them, and the goodput. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.aisbench.rate import Rated
from bench.clients.slo import GOOD_SHARE, Slo
from bench.clients.sweep import run_text
from deploy.memory.placement_table import table

_COLUMNS = (("mean", "Average"), ("p50", "Median"), ("p90", "P90"), ("p99", "P99"))
_KINDS = (("ttft_ms", "TTFT", "from when it was due"), ("tpot_ms", "TPOT", ""), ("e2e_ms", "E2EL", ""))


def one_rate(rated: Rated, slos: Sequence[Slo], *, timed: bool) -> str:
    """A rate: what `epd-bench load` prints of a run, and AISBench's table beside ours."""
    lines = [run_text(rated.measured, slos)]
    rows: list[tuple[str, ...]] = [("milliseconds", *(name for name, _ in _COLUMNS))]
    for name, theirs, since in _KINDS:
        found: Mapping[str, Any] = rated.measured.figures.get(name, {})
        if not found and f"{theirs}/Average" not in rated.own:
            continue
        origin = f", {since}" if since and timed else ", from sending" if since else ""
        ours = (f"{found[column]:.2f}" if column in found else "-" for column, _ in _COLUMNS)
        rows.append((f"{theirs.removesuffix('L')}{origin}", *ours))
        said = (rated.own.get(f"{theirs}/{column}") for _, column in _COLUMNS)
        origin = ", from sending" if since else ""
        rows.append((f"AISBench's {theirs}{origin}", *("-" if value is None else f"{value:.2f}" for value in said)))
    if len(rows) > 1:
        lines.append("\n  beside AISBench's own figures (of all its requests, the warm-up's too):\n" + table(rows))
    if "Request Throughput" in rated.own:
        lines.append(
            f"  AISBench's throughput, its drain included: {rated.own['Request Throughput']:.2f} requests/s, "
            f"{rated.own.get('Output Token Throughput', 0.0):.1f} output tokens/s; it counts "
            f"{rated.own.get('Success Requests', 0.0):.0f} successes and {rated.own.get('Failed Requests', 0.0):.0f} "
            "failures"
        )
    return "\n".join(lines)


def goodput_rps(rated: Sequence[Rated], slo: Slo, target: float = GOOD_SHARE) -> float:
    """The highest rate of a valid and steady run in which enough requests attain `slo`; 0 for none."""
    met = [
        one.rate_rps
        for one in rated
        if one.measured.valid
        and not one.measured.grows
        and one.measured.figures.get(f"slo_{slo}", {}).get("attainment", 0.0) >= target
    ]
    return max(met, default=0.0)


def overview(rated: Sequence[Rated], slos: Sequence[Slo], devices: int | None) -> str:
    """All rates: attainment, effective throughput, and the goodput of each objective."""
    rows: list[tuple[str, ...]] = [
        ("requests/s", *(f"attained {slo}" for slo in slos), "effective tokens/s", "per device", "valid")
    ]
    for one in rated:
        found = one.measured.figures
        first = found.get(f"slo_{slos[0]}", {})
        shares = [found.get(f"slo_{slo}", {}).get("attainment") for slo in slos]
        effective = (first.get("effective_tokens_per_s"), first.get("effective_tokens_per_s_per_device"))
        rows.append(
            (
                f"{one.rate_rps:g}",
                *("-" if share is None else f"{share:.1%}" for share in shares),
                *("-" if value is None else f"{value:.1f}" for value in effective),
                "yes" if one.measured.valid else "no",
            )
        )
    lines = [table(rows)]
    for slo in slos:
        rate = goodput_rps(rated, slo)
        each = f" ({rate / devices:g} per device)" if devices and rate else ""
        what = f"{rate:g} requests/s{each}" if rate else "no rate that was measured"
        lines.append(f"  goodput within {slo} ms for {GOOD_SHARE:.0%}: {what}")
    if devices is None:
        lines.append("  say --devices for figures per device")
    return "\n".join(lines)
