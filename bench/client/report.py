"""What a load found, as text for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.client.goodput import Goodput, Probed
from bench.client.measure import Measured
from bench.client.slo import Slo
from deploy.placement_table import table

KINDS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def one_run(measured: Measured, slos: Sequence[Slo]) -> str:
    """Latencies, objectives, what went wrong, and why the run is not valid where it is not."""
    found, run = measured.figures, measured.run
    lines = [
        f"{run.label}: {found['ok']} of {found['requests']} requests of the window answered whole "
        f"({found['window_s']:.1f} s of {found['run_s']:.1f} s; {found['requests_of_the_run']} requests in all)"
    ]
    rows: list[tuple[str, ...]] = [("milliseconds", *COLUMNS)]
    rows += [
        (kind.removesuffix("_ms").upper(), *(f"{found[kind][column]:.2f}" for column in COLUMNS))
        for kind in KINDS
        if kind in found
    ]
    if len(rows) > 1:
        lines.append(table(rows))
    if "output_tokens_per_s" in found:
        lines.append(
            f"  offered {found['offered_rps']:.2f} requests/s, answered {found['answered_rps']:.2f}, "
            f"{found['output_tokens_per_s']:.1f} output tokens/s"
        )
    lines += _objectives(found, slos)
    if faults := measured.row()["faults"]:
        said = measured.row()["said"]
        lines += [f"  {count} × {fault}: {said[fault]}" for fault, count in faults.items()]
    if measured.grows:
        lines.append(f"  no steady state: {measured.grows}")
    made = found["generator"]
    if "late_p99_ms" in made:
        lines.append(
            f"  generator: {made['late_p99_ms']:.1f} ms late (P99), {made['cpu_share']:.2f} of a core, "
            f"{made['cpu_us_per_request']:.0f} us per request"
        )
    lines += [f"  NOT VALID: {one.text}" for one in measured.objections]
    return "\n".join(lines)


def _objectives(found: Mapping[str, Any], slos: Sequence[Slo]) -> list[str]:
    rows: list[tuple[str, ...]] = [("objective", "attained", "effective tokens/s", "per device")]
    for slo in slos:
        one = found.get(f"slo_{slo}", {})
        if "attainment" not in one:
            continue
        effective = one.get("effective_tokens_per_s")
        each = one.get("effective_tokens_per_s_per_device")
        rows.append(
            (
                f"TTFT <= {slo.ttft_ms:g} ms, TPOT <= {slo.tpot_ms:g} ms",
                f"{one['attainment']:.1%}",
                "-" if effective is None else f"{effective:.1f}",
                "-" if each is None else f"{each:.1f}",
            )
        )
    if "slo_own" in found:
        rows.append(("each request's own", f"{found['slo_own']['attainment']:.1%}", "-", "-"))
    return [table(rows)] if len(rows) > 1 else []


def goodput(found: Goodput, probed: Sequence[Probed], target: float, slo: Slo, devices: int | None) -> str:
    """The rates of a search, and what it found."""
    rows: list[tuple[str, ...]] = [("requests/s", "attained", "requests", "steady")]
    rows += [
        (f"{one.rate_rps:.3f}", f"{one.attainment:.1%}", str(one.about), "yes" if one.steady else "no")
        for one in probed
    ]
    each = f" ({found.rate_rps / devices:.3f} per device)" if devices else ""
    if not found.rate_rps:
        what = "no rate that was tried meets it"
    elif found.missed_rps is None:
        what = f"at least {found.rate_rps:.3f} requests/s{each}: no rate was tried that misses"
    else:
        what = f"{found.rate_rps:.3f} requests/s{each}; {found.missed_rps:.3f} misses"
    doubt = "" if found.sure else "\n  not beyond chance: longer runs would tell"
    return f"goodput for {target:.0%} within {slo}:\n{table(rows)}\n  {what}{doubt}"
