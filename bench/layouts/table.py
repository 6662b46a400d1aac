"""The experiment as a table in the terminal; pictures are `bench/report`'s. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.layouts.book import Book
from bench.layouts.experiment import Experiment
from deploy.placement_table import table

HEAD = (
    *("entry", "devices", "rate", "TTFT P50", "P99", "TPOT P50", "P99", "tokens/s", "attained", "effective/device"),
    "",
)
MISSING = "-"


def table_of(experiment: Experiment, books: Sequence[Book]) -> str:
    """A line per finished run. What is real, emulated or simulated is said; a run that is not valid is marked."""
    slo = experiment.slos[0]
    lines: list[tuple[str, ...]] = [HEAD]
    for book in books:
        for row in book.rows:
            lines.append(
                (
                    book.entry.name,
                    str(book.entry.devices),
                    f"{row['rate_rps']:g}",
                    *(_number(row, kind, percent) for kind in ("ttft_ms", "tpot_ms") for percent in ("p50", "p99")),
                    _number(row, "output_tokens_per_s"),
                    _share(row, f"slo_{slo}", "attainment"),
                    _number(row, f"slo_{slo}", "effective_tokens_per_s_per_device"),
                    _remarks(row),
                )
            )
    what = (
        f"{experiment.kind}; {experiment.workload}; rates of all devices together; milliseconds; attained and "
        f"effective tokens/s per device within {slo}"
    )
    return f"{table(lines)}\n  {what}" if len(lines) > 1 else "nothing was measured"


def _remarks(row: Mapping[str, Any]) -> str:
    """Why the figures of a run are to be read with care."""
    return ", ".join([*([] if row["valid"] else ["NOT VALID"]), *(["no steady state"] if row["grows"] else [])])


def _found(row: Mapping[str, Any], *path: str) -> float | None:
    found: Any = row
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def _number(row: Mapping[str, Any], *path: str) -> str:
    found = _found(row, *path)
    return MISSING if found is None else f"{found:.1f}"


def _share(row: Mapping[str, Any], *path: str) -> str:
    found = _found(row, *path)
    return MISSING if found is None else f"{found:.0%}"
