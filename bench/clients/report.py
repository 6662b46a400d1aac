"""What a load result, as text for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.clients.measure import Measured
from bench.clients.slo import Slo
from deploy.memory.placement_table import table

KINDS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def one_run(measured: Measured, slos: Sequence[Slo]) -> str:
    """Latencies, objectives, what went wrong, and why the run is not valid where it is not."""
    figures, row = measured.figures, measured.row()
    lines = [
        f"{row['run']}: {figures['ok']} of {figures['requests']} requests of the window answered whole "
        f"({figures['window_s']:.1f} s of {figures['run_s']:.1f} s; {figures['requests_of_the_run']} requests in all)"
    ]
    rows: list[tuple[str, ...]] = [("milliseconds", *COLUMNS)]
    for kind in filter(figures.__contains__, KINDS):
        rows.append((kind.removesuffix("_ms").upper(), *(f"{figures[kind][column]:.2f}" for column in COLUMNS)))
    if len(rows) > 1:
        lines.append(table(rows))
    if "output_tokens_per_s" in figures:
        lines.append(
            f"  offered {figures['offered_rps']:.2f} requests/s, answered {figures['answered_rps']:.2f}, "
            f"{figures['output_tokens_per_s']:.1f} output tokens/s"
        )
    lines += _objectives(figures, slos)
    lines += [f"  {count} × {fault}: {row['said'][fault]}" for fault, count in row["faults"].items()]
    if measured.grows:
        lines.append(f"  no steady state: {measured.grows}")
    cost = figures["generator"]
    if "late_p99_ms" in cost:
        lines.append(
            f"  generator: {cost['late_p99_ms']:.1f} ms late (P99), {cost['cpu_share']:.2f} of a core, "
            f"{cost['cpu_us_per_request']:.0f} us per request"
        )
    return "\n".join([*lines, *(f"  NOT VALID: {one}" for one in row["objections"])])


def phases(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of `bench.phases.phase_rows`."""
    shown = [tuple(f"{value:.2f}" if isinstance(value, float) else value for value in row.values()) for row in rows]
    return table([tuple(rows[0]), *shown]) if rows else ""


def _objectives(figures: Mapping[str, Any], slos: Sequence[Slo]) -> list[str]:
    rows: list[tuple[str, ...]] = [("objective", "attained", "effective tokens/s", "per device")]
    for slo in slos:
        one = figures.get(f"slo_{slo}", {})
        if "attainment" in one:
            per_s = (one.get(f"effective_tokens_per_s{each}") for each in ("", "_per_device"))
            shown = ("-" if value is None else f"{value:.1f}" for value in per_s)
            rows.append((f"TTFT <= {slo.ttft_ms:g} ms, TPOT <= {slo.tpot_ms:g} ms", f"{one['attainment']:.1%}", *shown))
    return [table(rows)] if len(rows) > 1 else []


def goodput(met_rps: float, missed_rps: float | None, target: float, slo: Slo, devices: int | None) -> str:
    """What a search found."""
    each = f" ({met_rps / devices:.3f} per device)" if devices else ""
    found = f"{met_rps:.3f} requests/s{each}" if met_rps else "no rate that was tried"
    return f"goodput for {target:.0%} within {slo}: {found}; {'none' if missed_rps is None else missed_rps} misses"
