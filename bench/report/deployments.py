"""The tables: deployments at one rate (EPD-Serve Table 5), goodput of each, all runs with what became of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bench.client.slo import Slo
from bench.report.curves import GOOD_SHARE
from bench.report.experiment import Entry, Experiment
from bench.report.measures import TPOT, TPOT_P99, TTFT, TTFT_P99, attainment, effective_per_device, in_words
from bench.report.sheet import Cell, Sheet
from epd_serve.errors import ConfigError


def chosen_rate(experiment: Experiment, wanted: float | None = None) -> float | None:
    """The rate of Table 5 and of the breakdown: `wanted`, else the highest that half of the entries have validly.

    Raises:
        ConfigError: nothing was measured at `wanted`.
    """
    rates = experiment.measured_rates
    if wanted is not None:
        if wanted not in rates:
            measured = ", ".join(f"{rate:g}" for rate in rates) or "none"
            raise ConfigError(f"--rate {wanted:g}: nothing was measured at it, but at {measured}", param="--rate")
        return wanted

    there = [entry for entry in experiment.entries if entry.runs]

    def known(rate: float) -> bool:
        valid = [run for entry in there if (run := experiment.at(entry, rate)) is not None and run.valid]
        return 2 * len(valid) >= len(there)

    return max(filter(known, rates), default=max(rates, default=None))


def deployments(experiment: Experiment, rate: float, slos: Sequence[Slo]) -> Sheet:
    """Table 5 at `rate`: attainment and effective throughput within each of `slos`."""
    columns = ["deployment", "devices", *(one.label for one in (TTFT, TTFT_P99, TPOT, TPOT_P99))]
    for slo in slos:
        columns += [f"attainment of {slo} (%)", f"effective per device, {slo} (tokens/s)"]
    rows: list[tuple[Cell, ...]] = []
    faint = set()
    for entry in experiment.entries:
        run = experiment.at(entry, rate)
        if run is None:
            continue
        if not run.valid:
            faint.add(len(rows))
        cells: list[Cell] = [
            entry.name,
            entry.devices,
            *(one.of(entry, run) for one in (TTFT, TTFT_P99, TPOT, TPOT_P99)),
        ]
        for slo in slos:
            cells += [attainment(slo).of(entry, run), effective_per_device(slo).of(entry, run)]
        rows.append((*cells, run.valid))
    return Sheet(
        "table5",
        f"Deployments at {rate:g} req/s{' per device' if experiment.per_device else ''} (EPD-Serve Table 5)",
        (*columns, "valid"),
        tuple(rows),
        note="Objectives are TTFT:TPOT in ms. Effective throughput counts output tokens of the requests that attain "
        "the objective. Latencies are of whole answers; attainment is of all requests but those whose client left. "
        + ("" if experiment.per_device else "Rates are totals: a deployment of more devices has less load on each."),
        faint=frozenset(faint),
    )


def goodput_of(experiment: Experiment, entry: Entry, slo: Slo) -> tuple[float | None, float | None]:
    """(highest measured rate that attains `slo`, lowest measured rate above it that misses); of valid runs only.

    None: no such rate was measured. There is no interpolation: a rate nobody measured is no goodput.
    """
    shares = {
        rate: share
        for rate in experiment.measured_rates
        if (run := experiment.at(entry, rate)) is not None and run.valid
        if (share := attainment(slo).of(entry, run)) is not None
    }
    good = [rate for rate, share in shares.items() if share >= GOOD_SHARE]
    best = max(good, default=None)
    return best, min((rate for rate in shares if rate not in good and rate > (best or 0.0)), default=None)


def goodput(experiment: Experiment) -> Sheet:
    """A row per entry and objective."""
    rows: list[tuple[Cell, ...]] = []
    for slo in experiment.slos:
        for entry in experiment.entries:
            best, misses = goodput_of(experiment, entry, slo)
            if entry.runs:
                each = None if best is None else best if experiment.per_device else best / entry.devices
                rows.append(
                    (entry.name, entry.devices, in_words(slo), best, each, misses, _goodput_words(best, misses))
                )
    unit = "req/s per device" if experiment.per_device else "req/s"
    columns = (
        "deployment",
        "devices",
        "objective",
        f"goodput ({unit})",
        "goodput per device (req/s)",
        f"next measured rate, which misses ({unit})",
        "",
    )
    note = (
        f"The highest measured rate at which {GOOD_SHARE:g} % of the requests attain the objective. Nothing is "
        "interpolated: the true goodput lies between it and the next measured rate."
    )
    return Sheet("goodput", "Goodput", columns, tuple(rows), note=note)


def _goodput_words(best: float | None, misses: float | None) -> str:
    if best is None:
        return "no measured rate attains it"
    return "at least: no higher rate was measured" if misses is None else ""


def runs(experiment: Experiment) -> Sheet:
    """Every run with its requests, its validity and why."""
    rows: list[tuple[Cell, ...]] = []
    faint = set()
    for entry, run in experiment.all_runs():
        if not run.valid:
            faint.add(len(rows))
        counts = [None if (found := run.figure(name)) is None else int(found) for name in COUNTS]
        rates = [run.figure(name) for name in ("offered_rps", "answered_rps")]
        why = "; ".join([*run.objections, *([f"no steady state: {run.grows}"] if run.grows else [])])
        rows.append((entry.name, entry.devices, run.label, *counts, *rates, run.valid, why))
    columns = (
        "deployment",
        "devices",
        "run",
        "requests in the window",
        "whole answers",
        "errors",
        "cut short",
        "timed out",
        "offered (req/s)",
        "answered (req/s)",
        "valid",
        "why not, or what to know",
    )
    return Sheet("runs", "All runs", columns, tuple(rows), faint=frozenset(faint))


COUNTS = ("requests", "ok", "error", "truncated", "timeout")
