"""`epd-bench papers`: figures of papers, simulated as far as the planner's simulator can, beside what they print.

Each is a preset, a file of data in `bench/planner/presets`: layouts of equal devices, traffic, objectives, and the
profile of a device, written by hand from data sheets and printed points (`bench/planner/profiles`). Without names the
presets are listed. Nothing is started.

What comes out is *unvalidated* unless the preset names a record of real runs of layouts of the same shape, and the
worst of these runs was predicted to within the preset's limit.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.micro.rows import grouped
from bench.planner.preset_file import COMPUTED, Preset, Printed, Row, profile_of, read_preset
from bench.planner.readings import HIGHER, rows_of
from bench.record import ROOT, Record, environment, read_json, write
from bench.record import add_arguments as add_record_arguments
from deploy.memory.placement_table import table
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse

PRESETS_DIR, RESULTS = Path(__file__).parent / "presets", ROOT / "bench" / "results"
KIND = "simulated: figures of papers, no real stage"
OF_TIMES, TIMES = ("latency", "breakdown", "throughput"), ("ttft", "tpot")
"""Readings that are held against the medians of real runs, and of what; other readings are held against attainment."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets; none lists them")
    add_record_arguments(parser, quick="three in ten of the requests")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """List, or simulate and print. Raises ConfigError: no such preset, or a file that is wrong."""
    known = {path.stem: path for path in sorted(PRESETS_DIR.glob("*.json"))}
    for name in arguments.names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise ConfigError(f"no preset is called {name!r}: did you mean {near[0]!r}?", param="NAME")
    presets = {name: read_preset(known[name]) for name in arguments.names or known}
    if not arguments.names:
        head = ("preset", "paper", "reading", "", "shows")
        lines = [
            (name, f"{one.paper} {one.figure}", one.reading, verdict(one).partition(":")[0], one.shows)
            for name, one in presets.items()
        ]
        print(table([head, *lines]))
        return 0
    env = environment(argv, KIND, arguments)
    figures: dict[str, float] = {}
    kept: list[Row] = []
    for name, preset in presets.items():
        rows = rows_of(preset, quick=arguments.quick)
        print("\n".join(report(name, preset, rows)), end="\n\n", flush=True)
        kept += [{"preset": name, "verdict": verdict(preset), **row} for row in rows]
        for number, one in enumerate(preset.printed, 1):
            if found := values(one, rows):
                ends = {"low": min(found), "high": max(found)}
                figures |= {f"{name}/{number}/{end}": value for end, value in ends.items() if math.isfinite(value)}
    write(arguments.json, figures, env, kept)
    return 0


# --- beside the paper -------------------------------------------------------------------------------------------------


def report(name: str, preset: Preset, rows: Sequence[Row]) -> Iterator[str]:
    """Lines: what the paper shows, what was simulated, both side by side, and what it is worth."""
    profile = profile_of(preset.profile)
    yield f"{name}: {preset.paper} {preset.figure} ({preset.source})"
    yield f"The paper: {preset.shows}"
    yield f"Profile: {profile.model} on {profile.device}, {profile.how}"
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if "layout" in columns and all(row["layout"] == row["method"] for row in rows):
        columns.remove("layout")
    yield table([columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)])
    if preset.printed:
        head = ("beside the paper", "printed", "here")
        yield table([head, *((f"{one.what} ({one.source})", _printed(one), here(one, rows)) for one in preset.printed)])
    yield f"Not simulated, or our choice: {preset.not_simulated}"
    yield f"{'Computed' if preset.reading in COMPUTED else 'Simulated'}, {verdict(preset)}"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _printed(one: Printed) -> str:
    return one.best or ("no number" if one.value is None else f"{one.value:g}")


def here(one: Printed, rows: Sequence[Row]) -> str:
    """What was simulated of it: a number, or the least and the most over traffic, SLOs and rates; who is best."""
    if one.best:
        found = [max(best, key=best.__getitem__) for best in _bests(one, rows)]
        return ", ".join(f"{name} ({found.count(name)} of {len(found)})" for name in dict.fromkeys(found))
    if not (numbers := values(one, rows)):
        return "no figure: one of them serves none"
    low, high = _cell(min(numbers)), _cell(max(numbers))
    return low if low == high else f"{low} to {high}"


def values(one: Printed, rows: Sequence[Row]) -> list[float]:
    """Of each traffic, SLO and rate: the method's best layout, or its ratio to another method's."""
    if one.best:
        return []
    sign = 1.0 if one.column in HIGHER else -1.0
    found = []
    for best in _bests(one, rows):
        if one.of in best and not one.over:
            found.append(sign * best[one.of])
        elif one.of in best and best.get(one.over):
            found.append(best[one.of] / best[one.over])
    return found


def _bests(one: Printed, rows: Sequence[Row]) -> Iterator[dict[str, float]]:
    """By method, for each traffic, SLO, rate and size: its best layout's column, negative where less is better."""
    sign = 1.0 if one.column in HIGHER else -1.0
    fitting = [
        {"traffic": "", "slo": "", "rate_rps": 0.0, "images": 0, "batch": 0, "tokens": 0, **row}
        for row in rows
        if one.where.items() <= row.items() and one.column in row
    ]
    sizes = ("images", "batch", "tokens") if one.over or one.best else ()
    for own in grouped(fitting, "traffic", "slo", "rate_rps", *sizes).values():
        yield {name: max(sign * row[one.column] for row in each) for (name,), each in grouped(own, "method").items()}


# --- what it is worth -------------------------------------------------------------------------------------------------


def shape(layout: str) -> frozenset[str]:
    """Which groups of stages it has, however many of each: `3EP-5D` is like `EP-D`."""
    groups = parse(layout).groups
    return frozenset("-".join(sorted(member.role.value for member in group.members)) for group in groups)


def verdict(preset: Preset) -> str:
    """`validated: …` with the error, or `unvalidated: …` with the reason."""
    evidence = preset.validated_by
    if evidence is None:
        return "unvalidated: no real run of this is named"
    path = RESULTS / evidence.record
    if not path.exists():
        return f"unvalidated: {evidence.record} is not here"
    rows = [row for row in read_json(path, Record).rows if row.get("layout") in evidence.layouts]
    rows = [row for row in rows if "measured_attained" in row and "attained" in row]
    wanted = {shape(text): text for method in preset.methods for text in method.layouts}
    missing = [text for kind, text in wanted.items() if kind not in {shape(row["layout"]) for row in rows}]
    if missing or not rows:
        return f"unvalidated: {evidence.record} has no real run of the shape of {', '.join(missing) or 'these'}"
    error = max(error_of(preset, row) for row in rows)
    told = f"error {error:.0%} in the worst of {len(rows)} real runs of {evidence.record}, limit {preset.limit:.0%}"
    return f"{'validated' if error <= preset.limit else 'unvalidated'}: {told}"


def error_of(preset: Preset, row: Row) -> float:
    """Of one prediction: the largest relative one of its medians, or of its shares within the SLOs the largest."""
    if preset.reading in OF_TIMES:
        pairs = [(row[f"predicted_{kind}_p50_ms"], row[f"measured_{kind}_p50_ms"]) for kind in TIMES]
        return max(abs(float(predicted) / float(measured) - 1) for predicted, measured in pairs)
    pairs = list(zip(row["attained"], row["measured_attained"], strict=True))
    return max(abs(float(predicted) - float(measured)) for predicted, measured in pairs)
