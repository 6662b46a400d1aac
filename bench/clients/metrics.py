"""From records to figures: TTFT, TPOT, ITL, E2E, throughput, attainment, effective throughput per device. Pure.

TTFT: due → first content. TPOT: (last content - first) / (tokens - 1). ITL: between events with content. E2E: due → end
of the answer. Percentiles are of whole answers of the window; attainment is of all its requests but those whose client
left. Effective throughput (EPD-Serve Table 5): output tokens a second of requests that attain the objective, per
device. Where every answer of a percentile failed there is no figure, rather than a flattering one.

The window is the steady part of a run: without its beginning, when caches and batches fill, and without its end, when
they drain. A request belongs to it when it was *due* in it, however long it took; throughput counts the tokens that
*came* within it, whoever's they are: the drain tail counts nothing, and a server that falls behind shows it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.clients.results import Outcome, RequestRecord
from bench.clients.sender import Run
from bench.clients.slo import attainment, attains, beside, counted
from bench.statistic import percentile
from epd_serve.errors import StageError
from epd_serve.slo import Slo

PERCENTS = (50, 90, 95, 99)
WARM_UP_SHARE = 0.1
"""Of the time in which requests were issued, where nobody says how long the warm-up is."""
GROWTH = 2.0
"""More than so many times the requests under way at the window's end than at its begin: no steady state."""
FEW = 8
"""Requests under way of which the growth says nothing."""


@dataclass(frozen=True, slots=True)
class Window:
    """From `begin_s` until `end_s`, both CLOCK_MONOTONIC seconds."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    def due(self, records: Sequence[RequestRecord]) -> list[RequestRecord]:
        """The requests that count."""
        return [record for record in records if self.begin_s <= record.due_s <= self.end_s]

    def tokens(self, records: Sequence[RequestRecord]) -> float:
        """Output tokens that came within the window. Of an event that carries several, its share."""
        return sum(
            sum(self.begin_s <= at <= self.end_s for at in record.token_s) * record.output_tokens / len(record.token_s)
            for record in records
            if record.token_s
        )

    def grows(self, records: Sequence[RequestRecord]) -> str:
        """Why this is no steady state: more and more requests wait. "" where it is one, as far as can be seen."""
        before, after = (
            sum(record.due_s <= at_s < record.ended_s for record in records)
            for at_s in (self.begin_s + self.length_s * part for part in (1 / 6, 5 / 6))
        )
        in_order = sorted(self.due(counted(records)), key=lambda record: record.due_s)
        waits = [record.ttft_s for record in in_order if record.ttft_s is not None]
        third = len(waits) // 3
        if after <= FEW or after <= GROWTH * before or third == 0:
            return ""
        first, last = statistics.median(waits[:third]), statistics.median(waits[-third:])
        if last <= GROWTH * first:
            return ""
        return (
            f"requests under way grew from {before} to {after}, the median TTFT from {first * 1e3:.0f} to "
            f"{last * 1e3:.0f} ms: more was asked than is served, so the figures depend on how long the run was"
        )


def steady_window(begun_s: float, issued_s: float, warm_up_s: float | None) -> Window:
    """The window of a run that began at `begun_s` and whose last request was due at `issued_s`."""
    warm_up = WARM_UP_SHARE * (issued_s - begun_s) if warm_up_s is None else warm_up_s
    return Window(min(begun_s + warm_up, issued_s), issued_s)


def summary(run: Run, window: Window, slos: Sequence[Slo], devices: int | None) -> dict[str, Any]:
    """Figures of one run by name, nested.

    Args:
        devices: that served it; None: not known, and nothing is given per device.
    """
    records = window.due(run.rows)
    good = [record for record in records if record.ok]
    figures: dict[str, Any] = {
        "requests": len(records),
        **{outcome.value: sum(record.outcome is outcome for record in records) for outcome in Outcome},
        "requests_of_the_run": len(run.rows),
        "window_s": round(window.length_s, 3),
        "run_s": round(run.ended_s - run.begun_s, 3),
        "generator": generator(run),
    }
    if window.length_s > 0:
        ended = sum(record.ok and window.begin_s <= record.ended_s <= window.end_s for record in run.rows)
        figures["offered_rps"] = round(len(records) / window.length_s, 4)
        figures["answered_rps"] = round(ended / window.length_s, 4)
        figures["output_tokens_per_s"] = round(window.tokens(run.rows) / window.length_s, 4)
    figures["ttft_ms"] = _spread([record.ttft_s for record in good])
    figures["tpot_ms"] = _spread([record.tpot_s for record in good])
    figures["itl_ms"] = _spread([gap for record in good for gap in record.itl_s])
    figures["e2e_ms"] = _spread([record.e2e_s for record in good])
    if good:
        tokens = sum(record.output_tokens for record in good)
        prompts = [record.prompt_tokens for record in good if record.prompt_tokens is not None]
        figures["output_tokens_mean"] = round(tokens / len(good), 3)
        figures["prompt_tokens_mean"] = round(statistics.fmean(prompts), 3) if prompts else None
        figures["events_per_token"] = round(sum(len(record.token_s) for record in good) / max(tokens, 1), 4)
    for slo in beside(slos):
        figures[f"slo_{slo}"] = _objective(run.rows, records, window, slo, devices)
    return _present(figures)


def throughput(run: Run, *, warm_up_s: float = 0.0, seconds: float | None = None) -> dict[str, Any]:
    """Requests a second, and percentiles of first byte (`first_p50_ms` …) and end (`whole_p99_ms` …) after due.

    Args:
        warm_up_s: what was due before then is not counted. seconds: after it, at which the run is cut; None: its end.

    Raises:
        StageError: not one answer was good.
    """
    begin_s = run.begun_s + warm_up_s
    end_s = run.ended_s if seconds is None else begin_s + seconds
    records = [record for record in run.rows if record.due_s >= begin_s and record.ended_s <= end_s]
    good, kinds = [record for record in records if record.ok], faults(records)
    if not good:
        raise StageError(f"not one good answer: {kinds or run.stopped}", stage="load")
    times = {"first": [record.wait_s() for record in good], "whole": [record.e2e_s for record in good]}
    return {
        "requests": len(good),
        "errors": len(records) - len(good),
        "kinds": kinds,
        "seconds": round(end_s - begin_s, 3),
        "rps": round(len(good) / max(end_s - begin_s, 1e-9), 2),
        "generator_us_per_request": round(run.cpu_s / len(run.rows) * 1e6, 1),
        "generator_cpu": round(run.cpu_s / (run.ended_s - run.begun_s), 3),
        **{f"{name}_p{p}_ms": _ms(percentile(values, p)) for name, values in times.items() for p in (50, 90, 99)},
    }


def faults(records: Sequence[RequestRecord]) -> dict[str, int]:
    """How often what went wrong, most often first. Clients that left as they were meant to are no fault."""
    return dict(Counter(record.fault for record in records if record.fault and not record.left).most_common())


def generator(run: Run) -> dict[str, Any]:
    """What the sender itself did: how late it came to its requests, and what it cost."""
    late = [record.late_s for record in run.rows]
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
    of_run: Sequence[RequestRecord], of_window: Sequence[RequestRecord], window: Window, slo: Slo, devices: int | None
) -> dict[str, Any]:
    share = attainment(of_window, slo)
    figures: dict[str, Any] = {"attainment": None if share is None else round(share, 5)}
    if window.length_s > 0:
        effective = window.tokens([record for record in of_run if attains(record, slo)]) / window.length_s
        figures["effective_tokens_per_s"] = round(effective, 4)
        figures["effective_tokens_per_s_per_device"] = round(effective / devices, 4) if devices else None
    return _present(figures)


def _spread(seconds: Sequence[float | None]) -> dict[str, float]:
    """Percentiles, mean and maximum, in milliseconds; empty of an empty sample."""
    values = [value for value in seconds if value is not None]
    if not values:
        return {}
    percents = {f"p{percent}": _ms(percentile(values, percent)) for percent in PERCENTS}
    return {"mean": _ms(statistics.fmean(values)), **percents, "max": _ms(max(values))}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _present(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if value is not None and value != {}}
