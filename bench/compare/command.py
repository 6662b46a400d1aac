"""`epd-bench compare A B`: the ratio B/A of every figure that two results have, with bootstrap intervals.

A and B are results (`--json FILE` of any measurement), folders of one entry, or folders of `epd-bench layouts`, whose
entries are compared by name. What cannot be compared is refused, what has to be known beside the ratios is said.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.compare.compared import Compared, Drawing, compared, per_device
from bench.compare.conditions import refusals, warnings
from bench.compare.results import Result, read_results
from bench.compare.shown import shown, summary
from bench.record import environment, write
from epd_serve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="a result, or a folder of results: the base")
    parser.add_argument("b", type=Path, metavar="B", help="another: ratios are B/A")
    parser.add_argument("--force", action="store_true", help="compare also what cannot be compared, and say so")
    parser.add_argument("--all", action="store_true", help="show figures that are neither good nor bad, too")
    parser.add_argument("--resamples", type=int, default=2000, help="of the bootstrap (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--quick", action="store_true", help="200 resamples")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write ratios, intervals and environment there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Read, check, compare, print, write. Nothing is measured."""
    if arguments.resamples < 100:
        raise ConfigError(f"--resamples is {arguments.resamples}: 100 or more", param="--resamples")
    if arguments.seed < 0:
        raise ConfigError(f"--seed is {arguments.seed}: 0 or more", param="--seed")
    drawing = Drawing(200 if arguments.quick else arguments.resamples, arguments.seed)
    pairs = _pairs(read_results(arguments.a), read_results(arguments.b))
    objections = list(dict.fromkeys(text for a, b in pairs for text in refusals(a, b)))
    if objections and not arguments.force:
        raise ConfigError(
            f"{arguments.a} and {arguments.b} cannot be compared: {'; '.join(objections)}. --force does it all the same"
        )
    kinds = sorted({one.kind for pair in pairs for one in pair})
    print(f"B/A: {arguments.b} over {arguments.a} ({' against '.join(kinds)})")
    for text in objections:
        print(f"  NOT COMPARABLE, forced: {text}")
    said = list(dict.fromkeys(text for a, b in pairs for text in warnings(a, b)))
    for text in said:
        print(f"  note: {text}")
    found = [one for a, b in pairs for one in _compared(a, b, drawing)]
    print(f"\n{shown(found, everything=arguments.all)}\n\n{summary(found)}")
    env = environment(argv, kind=" against ".join(kinds), asked=arguments)
    env |= {"forced": objections, "notes": said, "a": dict(pairs[0][0].env), "b": dict(pairs[0][1].env)}
    write(arguments.json, figures(found), env, [one.to_json() for one in found])
    return 0


def figures(found: Sequence[Compared]) -> dict[str, float]:
    """`ENTRY/RUN/FIGURE/ratio`, and `low` and `high` of its interval."""
    flat: dict[str, float] = {}
    for one in found:
        name = "/".join(filter(None, (one.entry, one.run, one.name)))
        if one.ratio is not None:
            flat[f"{name}/ratio"] = one.ratio
        if one.interval is not None:
            flat |= {f"{name}/low": one.interval[0], f"{name}/high": one.interval[1]}
    return flat


def _compared(a: Result, b: Result, drawing: Drawing) -> list[Compared]:
    found = compared(a, b, drawing)
    if a.devices is None or b.devices is None or a.devices == b.devices:
        return found
    names = {(one.run, one.name) for one in found}
    alone = [one for one in found if (one.run, f"{one.name}_per_device") not in names]
    return [per_device(one, a.devices, b.devices) for one in alone]


def _pairs(a: Sequence[Result], b: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Two alone, else by name; what only one has is told."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    others = {one.name: one for one in b}
    pairs = [(one, others[one.name]) for one in a if one.name in others]
    alone = [one.name for one in (*a, *b) if one.name not in {pair[0].name for pair in pairs}]
    if not pairs:
        raise ConfigError(f"no entry is in both: A has {_names(a)}, B has {_names(b)}; name the folder of one of each")
    if alone:
        print(f"only in one of them: {', '.join(alone)}")
    return pairs


def _names(results: Sequence[Result]) -> str:
    return ", ".join(one.name or str(one.path) for one in results)
