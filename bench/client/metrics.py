"""From rows to figures: TTFT, TPOT, ITL, E2E, throughput, attainment, effective throughput per device. Pure.

TTFT: due → first content. TPOT: (last content - first) / (tokens - 1). ITL: between events with content. E2E: due → end
of the answer. Percentiles are of whole answers of the window; attainment is of all its requests but those whose client
left. Effective throughput (EPD-Serve Table 5): output tokens a second of requests that attain the objective, per
device. Where every answer of a percentile failed there is no figure, rather than a flattering one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.client.row import Outcome, Row
from bench.client.run import Run
from bench.client.slo import Slo, counted, own_attained
from bench.client.window import Window
from bench.statistic import percentile

PERCENTS = (50, 90, 95, 99)


def summary(run: Run, window: Window, slos: Sequence[Slo], devices: int | None) -> dict[str, Any]:
    """Figures of one run by name, nested.

    Args:
        devices: that served it; None: not known, and nothing is given per device.
    """
    rows = window.due(run.rows)
    good = [row for row in rows if row.ok]
    found: dict[str, Any] = {
        "requests": len(rows),
        **{outcome.value: sum(row.outcome is outcome for row in rows) for outcome in Outcome},
        "requests_of_the_run": len(run.rows),
        "window_s": round(window.length_s, 3),
        "run_s": round(run.ended_s - run.begun_s, 3),
        "generator": generator(run),
    }
    if window.length_s > 0:
        found["offered_rps"] = round(len(rows) / window.length_s, 4)
        ended = sum(row.ok and window.begin_s <= row.ended_s <= window.end_s for row in run.rows)
        found["answered_rps"] = round(ended / window.length_s, 4)
        found["output_tokens_per_s"] = round(window.tokens(run.rows) / window.length_s, 4)
    found["ttft_ms"] = _spread([row.ttft_s for row in good])
    found["tpot_ms"] = _spread([row.tpot_s for row in good])
    found["itl_ms"] = _spread([gap for row in good for gap in row.itl_s])
    found["e2e_ms"] = _spread([row.e2e_s for row in good])
    tokens = [row.output_tokens for row in good]
    if tokens:
        found["output_tokens_mean"] = round(statistics.fmean(tokens), 3)
        prompts = [row.prompt_tokens for row in good if row.prompt_tokens is not None]
        found["prompt_tokens_mean"] = round(statistics.fmean(prompts), 3) if prompts else None
        found["events_per_token"] = round(sum(len(row.token_s) for row in good) / max(sum(tokens), 1), 4)
    for slo in slos:
        found[f"slo_{slo}"] = _objective(run.rows, rows, window, slo, devices)
    brought = [attained for row in counted(rows) if (attained := own_attained(row)) is not None]
    if brought:
        found["slo_own"] = {"attainment": round(statistics.fmean(brought), 5), "requests": len(brought)}
    return _present(found)


def attainment(rows: Sequence[Row], slo: Slo) -> tuple[int, int]:
    """(requests that attain it, requests that it is about)."""
    about = counted(rows)
    return sum(map(slo.attained, about)), len(about)


def faults(rows: Sequence[Row]) -> dict[str, int]:
    """How often what went wrong, most often first. Clients that left as they were meant to are no fault."""
    return dict(Counter(row.fault for row in rows if row.fault and row.fault != "left").most_common())


def generator(run: Run) -> dict[str, Any]:
    """What the generator itself did: how late it came to its requests, and what it cost."""
    late = [row.late_s for row in run.rows]
    took_s = run.ended_s - run.begun_s
    return _present(
        {
            "late_p50_ms": _ms(percentile(late, 50)) if late else None,
            "late_p99_ms": _ms(percentile(late, 99)) if late else None,
            "cpu_share": round(run.cpu_s / took_s, 4) if took_s else None,
            "cpu_us_per_request": round(run.cpu_s / len(run.rows) * 1e6, 1) if run.rows else None,
        }
    )


def _objective(
    of_run: Sequence[Row], of_window: Sequence[Row], window: Window, slo: Slo, devices: int | None
) -> dict[str, Any]:
    attained, about = attainment(of_window, slo)
    found: dict[str, Any] = {"attainment": round(attained / about, 5) if about else None}
    if window.length_s > 0:
        effective = window.tokens([row for row in of_run if slo.attained(row)]) / window.length_s
        found["effective_tokens_per_s"] = round(effective, 4)
        found["effective_tokens_per_s_per_device"] = round(effective / devices, 4) if devices else None
    return _present(found)


def _spread(seconds: Sequence[float | None]) -> dict[str, float]:
    """Percentiles, mean and maximum, in milliseconds; empty of an empty sample."""
    values = sorted(value for value in seconds if value is not None)
    if not values:
        return {}
    return {
        "mean": _ms(statistics.fmean(values)),
        **{f"p{percent}": _ms(percentile(values, percent)) for percent in PERCENTS},
        "max": _ms(values[-1]),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _present(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None and value != {}}
