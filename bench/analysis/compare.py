"""`epd-bench compare A B`: the ratio B/A of every figure that two results have, with bootstrap intervals.

A and B are results (`--json FILE` of any measurement), folders of one deployment, or folders of `epd-bench layouts`,
whose deployments are compared by name. Loads have intervals. Needs SciPy: pip install 'epd-serve[bench]'.

Refused is what makes a ratio meaningless: another kind (real, emulated, simulated), another measurement, other
requests, other objectives. Another machine or commit may be the very thing that is compared, so it is only told.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from bench.analysis.page import require
from bench.analysis.ratios import Ratio, plain_ratio, run_ratio
from bench.analysis.results import ASKED, PER_DEVICE, LoadedRun, Result, read_results
from bench.analysis.sweep_results import better
from bench.micro.rows import table_of
from bench.record import busy, environment, flatten, write
from epd_serve.errors import ConfigError

OF_ALL_DEVICES = ("output_tokens_per_s", "answered_rps", "offered_rps")
"""Figures that are compared per device where device counts differ."""
_WHERE = frozenset("json rows out plot profile cache traces url header".split())
"""Flags that say where things are."""
_TOLD = ("machine/cpu", "machine/cores", "machine/arch", "commit", "versions/")


class Compared(NamedTuple):
    """One figure of both. `title`: deployment and run of the figure, as far as it has them."""

    title: str
    ratio: Ratio


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="a result, or a folder of results: the base")
    parser.add_argument("b", type=Path, metavar="B", help="another: ratios are B/A")
    parser.add_argument("--force", action="store_true", help="compare also what cannot be compared, and say so")
    parser.add_argument("--all", action="store_true", help="show figures that are neither good nor bad, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write ratios, intervals and environment there")
    parser.set_defaults(run=run)


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
    for title, group in groupby(found, key=lambda one: one.title):
        ratios = [one.ratio for one in group]
        shown = [one for one in ratios if arguments.all or (better(one.figure) and (one.a or one.b))]
        print(f"\n{title}\n{_table(shown)}")
    env = environment(argv, kind=kinds, asked=arguments)
    env |= {"forced": objections, "notes": notes, "a": dict(pairs[0][0].env), "b": dict(pairs[0][1].env)}
    rows = [
        {"of": one.title, **asdict(one.ratio), "better": better(one.ratio.figure), "verdict": one.ratio.verdict}
        for one in found
    ]
    write(arguments.json, figures(found), env, rows)
    return 0


def compared(a: Result, b: Result) -> list[Compared]:
    """Every figure that both have, in the order of A: those of the runs of loads, and others.

    Raises:
        ConfigError: they have none in common.
    """
    found = []
    for title, of_a, of_b in _runs(a, b):
        names: Sequence[str] = list(of_a.figures)
        if of_a.devices != of_b.devices:
            names = [name + PER_DEVICE if name in OF_ALL_DEVICES else name for name in names]
        ratios = (run_ratio(name, of_a, of_b) for name in names)
        found += [Compared("/".join(filter(None, (a.name, title))), ratio) for ratio in ratios if ratio]
    of_runs, why = a.runs.keys() | b.runs.keys(), "it has no requests of its own"
    found += [
        Compared(a.name, plain_ratio(name, value, b.figures[name], why))
        for name, value in a.figures.items()
        if name in b.figures and name.split("/")[0] not in of_runs
    ]
    if not found:
        labels = [", ".join(list(one.runs) or list(one.figures)[:5]) for one in (a, b)]
        raise ConfigError(f"{a.path} and {b.path} have no figure in common: {' and '.join(labels)}")
    return found


def figures(found: Sequence[Compared]) -> dict[str, float]:
    """`DEPLOYMENT/RUN/FIGURE/ratio`, and `low` and `high` of its interval."""
    return {
        "/".join(filter(None, (one.title, one.ratio.figure, name))): value
        for one in found
        for name in ("ratio", "low", "high")
        if (value := getattr(one.ratio, name)) is not None
    }


def _pairs(a: Sequence[Result], b: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Two alone, else by name; what only one has is told."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    sides = [{one.name: one for one in side} for side in (a, b)]
    shared = [name for name in sides[0] if name in sides[1]]
    if not shared:
        names = [", ".join(side) for side in sides]
        raise ConfigError(
            f"no deployment is in both: A has {names[0]}, B has {names[1]}; name the folder of one of each"
        )
    if alone := sorted(sides[0].keys() ^ sides[1].keys()):
        print(f"only in one of them: {', '.join(alone)}")
    return [(sides[0][name], sides[1][name]) for name in shared]


def _runs(a: Result, b: Result) -> Iterator[tuple[str, LoadedRun, LoadedRun]]:
    """(title, run of A, run of B) of those that both have: of one rate, else of one rate per device."""
    sides: Sequence[Mapping[str, LoadedRun]] = (a.runs, b.runs)
    if not a.runs.keys() & b.runs.keys():
        sides = [{_per_device(label, run.devices): run for label, run in side.items()} for side in sides]
    yield from ((title, run, sides[1][title]) for title, run in sides[0].items() if title in sides[1])


def _per_device(label: str, devices: int) -> str:
    """The label of a rate, per device; any other as it is."""
    number, space, rest = label.partition(" rps")
    return f"{float(number) / devices:.6g} rps per device{rest}" if space else label


def _table(ratios: Sequence[Ratio]) -> str:
    def between(one: Ratio) -> str:
        return "-" if one.low is None else f"{one.low:.3f}–{one.high:.3f}"

    columns: dict[str, str | Callable[[Ratio], object]] = {
        "figure": "{0.figure}",
        "A": "{0.a:.4g}",
        "B": "{0.b:.4g}",
        "B/A": lambda one: "-" if one.ratio is None else f"{one.ratio:.3f}",
        "95 %": between,
        "B is": lambda one: f"no interval: {one.why}" if one.why else one.verdict,
    }
    return table_of(ratios, columns)


def refusals(a: Result, b: Result) -> list[str]:
    """Why they cannot be compared, each with the field at fault; empty where they can."""
    first, second = ({"kind": one.kind, "measurement": _measurement(one), **_asked(one)} for one in (a, b))
    both = [name for name in first if name in second]
    return list(_differing(*({name: side[name] for name in both} for side in (first, second))))


def warnings(a: Result, b: Result) -> list[str]:
    """What a reader of the ratios has to know."""
    first, second = (
        {name: value for name, value in flatten(one.env).items() if name.startswith(_TOLD)} | {"devices": one.devices}
        for one in (a, b)
    )
    found = list(_differing(first, second))
    if not ("load" in a.env and "load" in b.env):
        flags = (
            {name: value for name, value in one.env.get("asked", {}).items() if name not in _WHERE} for one in (a, b)
        )
        found += _differing(*flags)
    return list(dict.fromkeys([*found, *_within("A", a), *_within("B", b)]))


def _within(side: str, one: Result) -> Iterator[str]:
    env = one.env
    if env.get("uncommitted_changes"):
        yield f"{side} was measured with uncommitted changes"
    if {"load_average_1min", "cores"} <= env.get("machine", {}).keys() and (text := busy(env)):
        yield f"{side}: {text}"
    if len(env.get("sessions", ())) > 1:
        yield f"{side} was measured in several sessions"
    for row in one.rows:
        if row.get("valid") is False:
            yield f"{side}: {row.get('run')} is not valid: {next(iter(row.get('objections', [])), 'no reason kept')}"
        if row.get("grows"):
            yield f"{side}: {row.get('run')} is no steady state, so its figures depend on how long it was"
    if env.get("load", {}).get("client_on_the_servers_host"):
        yield "the client ran on the server's host, and shared its cores"


def _asked(one: Result) -> Mapping[str, Any]:
    """What a load was asked to send, and to be judged by; nothing of another measurement."""
    load = one.env.get("load", {})
    return {name: load[name] for name in (*ASKED, "model") if name in load}


def _measurement(one: Result) -> str:
    """`ttft`, or `transfer pd`: the words of the command before its flags; of whatever loads an endpoint `load`."""
    words = shlex.split(str(one.env.get("command", "")).replace("python -m", "epd-bench"))[1:]
    return "load" if "load" in one.env else " ".join(words[: 2 if words[:1] == ["transfer"] else 1])


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Of each field that differs its name and both values."""
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            yield f"{name}: A has {a.get(name)}, B has {b.get(name)}"
