"""`epd-bench interference`: how much operators of the stages slow each other down on one device (EPD-Serve, Fig. 6).

Two processes, as two co-located stages are, each run one operator over and over from a common start; a call counts
when both were running from its beginning to its end. A slowdown is the time of a call beside the neighbour over the
time of the same call of the same process alone, in the same round; medians over rounds. With --core-share everything is
measured twice, in turns: all cores for both, and each process with its share (CPU: cores and threads of its own).

Real operators on the current device, and the same command on cpu, cuda and npu; only on CPU it has run. On CPU both
ranks of the all-reduce share the cores, so it shows what waiting leaves to a neighbour, not what a link does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.micro.interference.operators import Operator, default_sizes, operators, shares_of_best
from bench.micro.interference.processes import FLAG, OperatorProcess, Span, orders_of, parse_shares
from bench.micro.interference.windows import (
    Window,
    equal,
    intensity,
    label,
    latency_s,
    means_by_needs,
    overlapping,
    profile_of,
    windows,
)
from bench.micro.measurement import Measurement, Row, Usually, flag, in_turns, positive, several, whole
from bench.micro.rows import figure_table, table_of
from bench.record import flatten
from deploy.planner.interference import InterferenceProfile, Shares
from epd_serve.errors import ConfigError, StageError
from npu_ops.discovery import DiscoveryError, discover
from npu_ops.properties import read_properties

LEAD_S = 0.1
"""Both run for so long before anything counts."""
LONGEST_TIMES = 32
"""A window to which a process came late, or in which it finished too little, is repeated at twice the length until it
is so many times as long."""
SPARE_S = 60.0


FLAGS = {
    "--device": flag("what to measure", "auto", choices=("auto", "npu", "cuda", "cpu")),
    "--operators": flag("comma-separated (default: all that the device has)", type=several(str)),
    FLAG: flag("measure with these shares of the cores as well, such as 0.5,0.5", type=parse_shares, metavar="A,B"),
    "--rounds": flag("measurements of every pair", Usually(5, quick=1), whole()),
    "--seconds": flag("length of each measurement", Usually(1.0, quick=0.4), positive),
    "--profile": flag("save the profile there (JSON), for placement", type=Path, metavar="FILE"),
}


@functools.cache
def device_of(kind: str) -> Mapping[str, Any]:
    """The first device of the kind that may be used: kind, name, how many there are, cores.

    Raises:
        ConfigError: there is none.
    """
    try:
        inventory = discover(kind)
    except DiscoveryError as error:
        raise ConfigError(str(error), param="--device") from error
    if inventory.kind != "cpu" and not inventory.ids:
        raise ConfigError(f"--device {kind}: {inventory.note}", param="--device")
    first, devices = read_properties(inventory)[0], max(1, len(inventory.ids))
    if first.users:
        print(f"{len(first.users)} processes of others hold memory of {first.name}: they are in every latency")
    return {"kind": inventory.kind, "name": first.name, "devices": devices, "cores": dict(first.cores)}


def chosen(names: Sequence[str] | None, device: Mapping[str, Any]) -> list[Operator]:
    """The operators to measure. Raises ConfigError for one that this device does not have."""
    kind, devices = device["kind"], device["devices"]
    every = operators(kind, devices, default_sizes(kind))
    if unknown := [name for name in names or () if name not in every]:
        has = f"{kind} with {devices} device(s) has {', '.join(every)}"
        raise ConfigError(f"--operators {unknown[0]}: {has}", param="--operators")
    return [every[name] for name in names or every]


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """First the device and its operators; then all windows of all divisions in each round, in an order drawn anew."""
    device = device_of(arguments.device)
    every = chosen(arguments.operators, device)
    names = [one.name for one in every]
    with contextlib.ExitStack() as stack:
        divisions: list[Shares | None] = [None, *([arguments.core_share] if arguments.core_share else [])]
        pairs = [_Pair(device["kind"], division, names, stack) for division in divisions]
        yield {"device": device, "operators": [asdict(one) for one in every]}
        due = [(pair, window) for pair in pairs for window in windows(names, pair.shares)]
        for turn, (pair, window) in in_turns(due, arguments.rounds, shown=f"{len(due)} windows"):
            yield from pair.measure(window, turn, arguments.seconds)


class _Pair:
    """Two processes with one division of the cores, which have prepared these operators; they end with `stack`."""

    def __init__(self, kind: str, shares: Shares | None, names: Sequence[str], stack: contextlib.ExitStack) -> None:
        self.shares = shares
        self._processes = []
        for order in orders_of(kind, shares) if shares else (None, None):
            # Frameworks count the visible devices from 0, whatever the operator's list of ids.
            self._processes.append(OperatorProcess(kind, 0, default_sizes(kind), order))
            stack.callback(self._processes[-1].stop)
        if any(granted := [process.ready() for process in self._processes]):
            print(f"with core shares the processes have: {'; '.join(granted)}", flush=True)
        # One after the other: each is to find out alone how long its calls take.
        self._repeats = [{name: process.prepare(name) for name in names} for process in self._processes]

    def measure(self, window: Window, turn: int, seconds: float) -> Iterator[Row]:
        """With equal shares in every other round the other way round."""
        seats = window[::-1] if turn % 2 and equal(self.shares) else window
        taken = {seat: name for seat, name in enumerate(seats) if name is not None}
        shares = self.shares or (None, None)
        for (seat, name), own in zip(taken.items(), self._samples(taken, seconds), strict=True):
            yield {
                "round": turn,
                "process": seat,
                "operator": name,
                "share": shares[seat],
                "beside": taken.get(1 - seat),
                "beside_share": shares[1 - seat] if len(taken) > 1 else None,
                "latency_ms": round(latency_s(own, self._repeats[seat][name]) * 1e3, 5),
                "samples": len(own),
            }

    def _samples(self, taken: Mapping[int, str], seconds: float) -> list[list[Span]]:
        """Of each process in `taken`. Raises StageError where the longest window was spoilt, too."""
        times = 1
        while True:
            at = time.monotonic() + 0.02
            begin, end = at + times * LEAD_S, at + times * (LEAD_S + seconds)
            for seat, name in taken.items():
                self._processes[seat].begin(name, at, end)
            spans = [self._processes[seat].spans(end - at + SPARE_S) for seat in taken]
            try:
                return overlapping(spans, begin, end)
            except StageError:
                if times >= LONGEST_TIMES:
                    raise
            times *= 2


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Per division: time alone, every slowdown, and the means of pairs with the same and with different needs."""
    profile = profile_of(rows)
    bound = {one.name: one.needs for one in profile.operators}
    return flatten(
        {
            label(one.core_shares): {
                "mean_slowdown": float(np.mean([pair.slowdown for pair in one.slowdowns])),
                "mean_slowdown_of_needs": means_by_needs(one, bound),
                "alone_ms": {name: round(seconds * 1e3, 5) for name, seconds in one.alone_s.items()},
                "slowdown": {f"{pair.operator}/{pair.beside}": pair.slowdown for pair in one.slowdowns},
            }
            for one in profile.maps
        }
    )


def tables(rows: Sequence[Row]) -> Iterable[str]:
    """The operators, then per division the slowdowns, stages beside stages, and means."""
    profile, named = profile_of(rows), figures(rows)
    best, divisions = best_of(rows, profile), [label(one.core_shares) for one in profile.maps]
    lines = [
        {
            **asdict(one),
            "intensity": intensity(one.flops / one.moved_bytes),
            "best": best[one.name],
            "alone_ms": [named[f"{division}/alone_ms/{one.name}"] for division in divisions],
        }
        for one in profile.operators
    ]
    yield table_of(
        lines,
        {
            "operator": "{name}",
            "of": "{stages}",
            "FLOP/byte": "{intensity}",
            "share of best FLOP/s": "{best[0]:.0%}",
            "of best bytes/s": "{best[1]:.0%}",
            "needs": "{needs}",
            **{f"ms alone, {division}": f"{{alone_ms[{at}]:.3f}}" for at, division in enumerate(divisions)},
        },
    )
    for division, each in zip(divisions, profile.maps, strict=True):
        slower = [{"own": own} | {beside: each.of(own, beside).slowdown for beside in each.alone_s} for own in best]
        columns = {beside: f"{{{beside}:.2f}}" for beside in each.alone_s}
        yield table_of(slower, {f"{division}: times slower, beside": "{own}", **columns})
        means = [
            {"of": of, **{by: profile.between(of, by, each.core_shares) or math.nan for by in "EPD"}} for of in "EPD"
        ]
        yield table_of(means, {"stage, beside": "{of}", **{by: f"{{{by}:.2f}}" for by in "EPD"}})
        yield figure_table(named, [name for name in named if name.startswith(f"{division}/mean")])


def best_of(rows: Sequence[Row], profile: InterferenceProfile) -> dict[str, tuple[float, float]]:
    every = {one["name"]: Operator(**one) for one in rows[0]["operators"]}
    return shares_of_best(every, profile.maps[0].alone_s)


def save_profile(arguments: argparse.Namespace, rows: Sequence[Row], env: Mapping[str, Any]) -> None:
    if arguments.profile is not None:
        measured = {name: env[name] for name in ("date", "commit", "command", "machine", "versions")}
        replace(profile_of(rows), measured=measured).save(arguments.profile)


def about(arguments: argparse.Namespace) -> dict[str, str]:
    device = device_of(arguments.device)
    chosen(arguments.operators, device)
    return {"kind": "real", "device": f"{device['kind']}: {device['name']}"}


MEASUREMENT = Measurement(
    quick="one short round",
    flags=FLAGS,
    about=about,
    measure=measure,
    figures=figures,
    tables=tables,
    also=save_profile,
)
add_arguments = MEASUREMENT.add_arguments
