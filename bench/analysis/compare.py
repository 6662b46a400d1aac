"""`epd-bench compare A B`: the ratio B/A of every figure that two results have, with bootstrap intervals.

A and B are results (`--json FILE` of any measurement), folders of one deployment, or folders of `epd-bench layouts`,
whose deployments are compared by name. What cannot be compared is refused, what has to be known beside the ratios is
said. Needs SciPy: pip install 'epd-serve[bench]'.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from bench.analysis.conditions import refusals, warnings
from bench.analysis.intervals import ratio_interval
from bench.analysis.metrics import Direction, better
from bench.analysis.page import require
from bench.analysis.results import Result, read_results
from bench.analysis.samples import LoadedRuns, Samples, row_samples
from bench.record import environment, write
from deploy.placement_table import table
from epd_serve.errors import ConfigError

PER_DEVICE = ("output_tokens_per_s", "answered_rps", "offered_rps")
"""Figures of all devices together, which are compared per device where device counts differ."""
HEAD = ("figure", "A", "B", "B/A", "95 %", "over", "B is")
Verdict = Literal["better", "worse", "no difference shown", "no interval", ""]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="a result, or a folder of results: the base")
    parser.add_argument("b", type=Path, metavar="B", help="another: ratios are B/A")
    parser.add_argument("--force", action="store_true", help="compare also what cannot be compared, and say so")
    parser.add_argument("--all", action="store_true", help="show figures that are neither good nor bad, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write ratios, intervals and environment there")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Compared:
    """One figure of both.

    Attributes:
        deployment, run: of the figure; "" where there is none.
        ratio: B/A; None where A is 0, or one is below it.
        low, high: of its interval (95 %); None where there are no samples, too few, or none that give the figure.
        over: what was resampled: `paired requests`, `requests`, `paired slices`, `slices`, `rows`, "".
        samples: in A and B. why: there is no interval.
    """

    deployment: str
    run: str
    figure: str
    a: float
    b: float
    ratio: float | None
    better: Direction
    low: float | None = None
    high: float | None = None
    over: str = ""
    samples: tuple[int, int] = (0, 0)
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        """Of B. Without a direction of the figure there is none but that no difference shows."""
        if self.low is None or self.high is None:
            return "no interval" if self.better else ""
        if self.low <= 1 <= self.high:
            return "no difference shown"
        if not self.better:
            return ""
        return "better" if (self.low > 1) == (self.better == "higher") else "worse"

    def per_device(self, a: int, b: int) -> Compared:
        """A throughput of so many devices in A and in B, as one of each of them."""
        ratio, low, high = (None if one is None else one * a / b for one in (self.ratio, self.low, self.high))
        figure = f"{self.figure}_per_device"
        return replace(self, figure=figure, a=self.a / a, b=self.b / b, ratio=ratio, low=low, high=high)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Read, check, compare, print, write. Nothing is measured."""
    require(["scipy"])
    pairs = _pairs(read_results(arguments.a), read_results(arguments.b))
    objections = list(dict.fromkeys(text for a, b in pairs for text in refusals(a, b)))
    if objections and not arguments.force:
        raise ConfigError(
            f"{arguments.a} and {arguments.b} cannot be compared: {'; '.join(objections)}. --force does it all the same"
        )
    kinds = " against ".join(sorted({one.kind for pair in pairs for one in pair}))
    notes = list(dict.fromkeys(text for a, b in pairs for text in warnings(a, b)))
    print(f"B/A: {arguments.b} over {arguments.a} ({kinds})")
    for text in [*(f"NOT COMPARABLE, forced: {text}" for text in objections), *(f"note: {text}" for text in notes)]:
        print(f"  {text}")
    found = [one for a, b in pairs for one in compared(a, b)]
    print(f"\n{_table(found, everything=arguments.all)}\n\n{_counts(found)}")
    env = environment(argv, kind=kinds, asked=arguments)
    env |= {"forced": objections, "notes": notes, "a": dict(pairs[0][0].env), "b": dict(pairs[0][1].env)}
    write(arguments.json, figures(found), env, [{**asdict(one), "verdict": one.verdict} for one in found])
    return 0


def compared(a: Result, b: Result) -> list[Compared]:
    """Every figure that both have, in the order of A.

    Raises:
        ConfigError: they have none in common.
    """
    found = list(_loads(a, b) if _is_load(a) and _is_load(b) else _others(a, b))
    if not found:
        labels = [
            ", ".join([str(row["run"]) for row in one.rows if "run" in row] or list(one.figures)[:5]) for one in (a, b)
        ]
        raise ConfigError(f"{a.path} and {b.path} have no figure in common: {' and '.join(labels)}")
    return found


def figures(found: Sequence[Compared]) -> dict[str, float]:
    """`DEPLOYMENT/RUN/FIGURE/ratio`, and `low` and `high` of its interval."""
    return {
        "/".join(filter(None, (one.deployment, one.run, one.figure, name))): value
        for one in found
        for name, value in (("ratio", one.ratio), ("low", one.low), ("high", one.high))
        if value is not None
    }


def _pairs(a: Sequence[Result], b: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Two alone, else by name; what only one has is told."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    sides = [{one.name: one for one in side} for side in (a, b)]
    names = [", ".join(side) for side in sides]
    if not (shared := [name for name in sides[0] if name in sides[1]]):
        raise ConfigError(
            f"no deployment is in both: A has {names[0]}, B has {names[1]}; name the folder of one of each"
        )
    if alone := sorted(sides[0].keys() ^ sides[1].keys()):
        print(f"only in one of them: {', '.join(alone)}")
    return [(sides[0][name], sides[1][name]) for name in shared]


def _is_load(one: Result) -> bool:
    return bool(one.rows) and all({"run", "window_s"} <= row.keys() for row in one.rows)


def _loads(a: Result, b: Result) -> Iterator[Compared]:
    devices = (a.devices, b.devices) if a.devices and b.devices else (1, 1)
    rows = [{str(row["run"]): row for row in one.rows} for one in (a, b)]
    for title, labels in _runs(rows, devices):
        requests = a.requests.get(labels[0]), b.requests.get(labels[1])
        runs = None
        if requests[0] and requests[1]:
            windows_s = float(rows[0][labels[0]]["window_s"]), float(rows[1][labels[1]]["window_s"])
            runs = LoadedRuns(requests[0], requests[1], windows_s, devices)
        shared = dict(_common(a, b, f"{labels[0]}/", f"{labels[1]}/"))
        for name, values in shared.items():
            samples = runs.samples(name, values) if runs else Samples(why="its requests were not kept")
            one = _one(a.name, title, name, values, samples)
            if devices[0] == devices[1]:
                yield one
            elif f"{name}_per_device" not in shared:
                yield one.per_device(*devices) if name in PER_DEVICE else one
    for name, values in _common(a, b):
        if not {name.split("/")[0]} & {*rows[0], *rows[1]}:
            yield _one(a.name, "", name, values, Samples(why="it has no requests of its own"))


def _runs(rows: Sequence[Mapping[str, Any]], devices: tuple[int, int]) -> Iterator[tuple[str, tuple[str, str]]]:
    """(title, labels in A and B) of the runs that both have: of one rate, else of one rate per device."""
    if shared := [label for label in rows[0] if label in rows[1]]:
        yield from ((label, (label, label)) for label in shared)
        return
    sides = [{_per_device(label, count): label for label in side} for side, count in zip(rows, devices, strict=True)]
    yield from ((title, (label, sides[1][title])) for title, label in sides[0].items() if title in sides[1])


def _per_device(label: str, devices: int) -> str:
    """The label of a rate, per device; any other as it is."""
    number, space, rest = label.partition(" rps")
    return f"{float(number) / devices:.6g} rps per device{rest}" if space else label


def _others(a: Result, b: Result) -> Iterator[Compared]:
    for name, values in _common(a, b):
        yield _one(a.name, "", name, values, row_samples(name, a.rows, b.rows, values))


def _common(a: Result, b: Result, left: str = "", right: str = "") -> Iterator[tuple[str, tuple[float, float]]]:
    """(name without its prefix, values) of the figures that both have under these prefixes."""
    for name, value in a.figures.items():
        other = f"{right}{name.removeprefix(left)}"
        if name.startswith(left) and other in b.figures:
            yield name.removeprefix(left), (value, b.figures[other])


def _one(deployment: str, run: str, name: str, values: tuple[float, float], samples: Samples) -> Compared:
    a, b = values
    plain = Compared(deployment, run, name, a, b, b / a if a > 0 and b >= 0 else None, better(name), why=samples.why)
    if plain.ratio is None or samples.base is None or samples.other is None:
        return replace(plain, why=samples.why or "one of them is 0 or below")
    plain = replace(plain, over=samples.over, samples=(samples.base.counted, samples.other.counted))
    if (found := ratio_interval(samples.other, samples.base, paired=samples.paired)) is None:
        return replace(plain, why="too many resamples are 0")
    return replace(plain, low=found[0], high=found[1])


def _table(found: Sequence[Compared], *, everything: bool) -> str:
    """A table per deployment and run. `everything`: also figures that are neither good nor bad, or 0 in both."""
    parts = []
    for titles, group in groupby(found, key=lambda one: (one.deployment, one.run)):
        lines = [_line(one) for one in group if everything or (one.better and (one.a or one.b))]
        if lines:
            parts.append("\n".join([*filter(None, [", ".join(filter(None, titles))]), table([HEAD, *lines])]))
    return "\n\n".join(parts) or "  no figure with a direction; --all shows the others"


def _line(one: Compared) -> tuple[str, ...]:
    ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
    between = "-" if one.low is None or one.high is None else f"{one.low:.3f}–{one.high:.3f}"
    over = f"{min(one.samples)} {one.over}" if one.over else "-"
    return one.figure, f"{one.a:.4g}", f"{one.b:.4g}", ratio, between, over, one.verdict or "-"


def _counts(found: Sequence[Compared]) -> str:
    """How many figures are better, worse, and why some have no interval."""
    judged = [one for one in found if one.better]
    verdicts, reasons = Counter(one.verdict for one in judged), Counter(one.why for one in judged if one.why)
    return table(
        [("B is", "figures"), *((name or "-", str(count)) for name, count in [*verdicts.items(), *reasons.items()])]
    )
