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
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import interference_map
from bench.interference_process import OperatorProcess
from bench.interference_windows import Found, alike, latency_s, maps, overlapping, slowdowns, windows
from bench.record import add_arguments as add_record_arguments
from bench.record import environment, flatten, write
from bench.shares import cores_of_shares, parse_shares
from deploy.placement_table import table
from epd_serve.errors import ConfigError, StageError
from npu_ops.discovery import DeviceInventory, DiscoveryError, discover
from npu_ops.interference import Operator, default_sizes, needs, operators, shares_of_best
from npu_ops.interference_profile import InterferenceMap, InterferenceProfile, ProfiledOperator, Shares
from npu_ops.properties import read_properties

LEAD_S = 0.1
"""Both run for so long before anything counts."""

TRIES = 4
"""A window to which a process came late, or in which it finished too little, is repeated at twice the length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "npu", "cuda", "cpu"), default="auto", help="what to measure")
    parser.add_argument("--operators", help="comma-separated (default: all that the device has)")
    parser.add_argument(
        "--core-share", metavar="A,B", help="measure with these shares of the cores as well, such as 0.5,0.5"
    )
    parser.add_argument("--rounds", type=int, help="times that every pair is measured (default 5, quick 1)")
    parser.add_argument("--seconds", type=float, help="length of each measurement (default 1, quick 0.4)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the heat map there (PNG; needs matplotlib)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="save the profile there (JSON), for placement")
    add_record_arguments(parser, quick="one short round")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Target:
    """The device that is measured, and how many of its kind there are.

    Attributes:
        cores: as `npu_ops.properties` knows them. users: processes of others that hold memory of it now.
    """

    kind: str
    index: int
    name: str
    devices: int
    cores: Mapping[str, int] = field(default_factory=dict)
    users: int = 0


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print the tables, draw, save the profile, write the record."""
    if arguments.plot is not None:
        interference_map.check_plot(arguments.plot)
    target = target_of(arguments.device)
    every = chosen(arguments.operators, target)
    rounds = 1 if arguments.quick else 5
    rounds = rounds if arguments.rounds is None else arguments.rounds
    seconds = (0.4 if arguments.quick else 1.0) if arguments.seconds is None else arguments.seconds
    if rounds < 1 or seconds <= 0:
        raise ConfigError("--rounds and --seconds have to be above 0", param="--rounds" if rounds < 1 else "--seconds")
    divisions: list[Shares | None] = [None]
    if arguments.core_share:
        divisions.append(parse_shares(arguments.core_share))
    if target.users:
        print(f"{target.users} process(es) hold memory of {target.name}: what they run is in every latency", flush=True)
    env = environment(argv) | {"device": f"{target.kind}: {target.name}"}
    found = measure(target, list(every), divisions, rounds, seconds)
    profile = profile_of(target, every, found, env)
    print(report(profile, every), flush=True)
    if arguments.plot is not None:
        heading = (
            f"{target.name} ({target.kind}), real; medians of {rounds} x {seconds:g} s per pair, {env['date'][:10]}"
        )
        interference_map.draw(arguments.plot, profile, shares_of(profile, every), heading)
    if arguments.profile is not None:
        profile.save(arguments.profile)
    write(arguments.json, figures_of(profile), env, rows_of(found))
    return 0


def target_of(kind: str) -> Target:
    """The first device of the kind that may be used. Raises ConfigError where there is none."""
    try:
        inventory: DeviceInventory = discover(kind)
    except DiscoveryError as error:
        raise ConfigError(str(error), param="--device") from error
    if inventory.kind != "cpu" and not inventory.ids:
        raise ConfigError(f"--device {kind}: {inventory.note}", param="--device")
    first = read_properties(inventory)[0]
    # Frameworks count the visible devices from 0, whatever the operator's list of ids.
    return Target(inventory.kind, 0, first.name, max(1, len(inventory.ids)), first.cores, len(first.users))


def chosen(names: str | None, target: Target) -> dict[str, Operator]:
    """The operators to measure. Raises ConfigError for one that this device does not have."""
    every = operators(target.kind, target.devices, default_sizes(target.kind))
    if not names:
        return every
    unknown = [name for name in names.split(",") if name not in every]
    if unknown:
        raise ConfigError(
            f"--operators {unknown[0]}: {target.kind} with {target.devices} device(s) has {', '.join(every)}",
            param="--operators",
        )
    return {name: every[name] for name in dict.fromkeys(names.split(","))}


def measure(
    target: Target, names: Sequence[str], divisions: Sequence[Shares | None], rounds: int, seconds: float
) -> list[Found]:
    """All windows of all divisions in each round, in an order drawn anew."""
    chance = random.Random(0)
    found: list[Found] = []
    with contextlib.ExitStack() as stack:
        pairs = [(division, stack.enter_context(_Pair(target, division, names))) for division in divisions]
        for turn in range(rounds):
            due = [(pair, window) for division, pair in pairs for window in windows(names, division)]
            begun = time.monotonic()
            for pair, window in chance.sample(due, len(due)):
                found += pair.measure(window, turn, seconds)
            print(f"round {turn + 1} of {rounds}: {len(due)} windows, {time.monotonic() - begun:.0f} s", flush=True)
    return found


class _Pair:
    """Two processes with one division of the cores. Use as a context manager."""

    def __init__(self, target: Target, shares: Shares | None, names: Sequence[str]) -> None:
        self._shares: tuple[float | None, float | None] = shares or (None, None)
        cores = cores_of_shares(shares) if target.kind == "cpu" else ((), ())
        sizes = default_sizes(target.kind)
        self._seats: list[OperatorProcess] = []
        self._repeats: list[dict[str, int]] = []
        self._names = names
        with contextlib.ExitStack() as stack:
            for own, share in zip(cores, self._shares, strict=True):
                seat = OperatorProcess(target.kind, target.index, sizes, own, share)
                stack.callback(seat.stop)
                self._seats.append(seat)
            self._ends = stack.pop_all()

    def __enter__(self) -> _Pair:
        try:
            for seat in self._seats:
                seat.ready()
            for seat in self._seats:  # one after the other: each is to find out alone how long its calls take
                self._repeats.append({name: seat.prepare(name) for name in self._names})
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def measure(self, window: Sequence[str], turn: int, seconds: float) -> list[Found]:
        """Alone: in each process in turn. A pair: together, and in every other round the other way round."""
        if len(window) == 1:
            return [one for seat in (0, 1) for one in self._run({seat: window[0]}, turn, seconds)]
        equal = self._shares[0] == self._shares[1]
        first = turn % 2 if equal else 0
        return self._run({first: window[0], 1 - first: window[1]}, turn, seconds)

    def _run(self, taken: Mapping[int, str], turn: int, seconds: float) -> list[Found]:
        lead_s = LEAD_S
        for left in reversed(range(TRIES)):
            at = time.monotonic() + 0.02
            begin, end = at + lead_s, at + lead_s + seconds
            for seat, name in taken.items():
                self._seats[seat].begin(name, at, end)
            spans = [self._seats[seat].spans(end - at + 60.0) for seat in taken]
            try:
                kept = overlapping(spans, begin, end)
                break
            except StageError:
                if not left:
                    raise
                lead_s, seconds = 2 * lead_s, 2 * seconds
        found = []
        for (seat, name), own in zip(taken.items(), kept, strict=True):
            others = [(other, self._shares[place]) for place, other in taken.items() if place != seat]
            latency = latency_s(own, self._repeats[seat][name])
            beside = others[0] if others else None
            found.append(Found(turn, seat, name, self._shares[seat], beside, latency, len(own)))
        return found


def profile_of(
    target: Target, every: Mapping[str, Operator], found: Sequence[Found], env: Mapping[str, Any]
) -> InterferenceProfile:
    """What is saved. The resources are told from the latencies without shares."""
    measured = maps(found, list(every))
    bound = needs(every, measured[0].alone_s)
    listed = tuple(
        ProfiledOperator(one.name, one.stages, one.flops, one.moved_bytes, bound[name]) for name, one in every.items()
    )
    device = {"kind": target.kind, "name": target.name, "devices": target.devices, "cores": dict(target.cores)}
    keep = ("date", "commit", "command", "machine", "versions")
    return InterferenceProfile(device, listed, measured, "real", {name: env[name] for name in keep})


def shares_of(profile: InterferenceProfile, every: Mapping[str, Operator]) -> dict[str, tuple[float, float]]:
    return shares_of_best(every, profile.maps[0].alone_s)


def label(division: Shares | None) -> str:
    return "all cores" if division is None else f"share {division[0]:g} beside {division[1]:g}"


def figures_of(profile: InterferenceProfile) -> dict[str, float]:
    """Per division: time alone, every slowdown, and the means of pairs with the same and with different needs."""
    bound = {one.name: one.needs for one in profile.operators}
    nested: dict[str, Any] = {}
    for one in profile.maps:
        pairs: dict[str, dict[str, float]] = {}
        for pair in one.slowdowns:
            pairs.setdefault(pair.operator, {})[pair.beside] = pair.slowdown
        nested[label(one.core_shares)] = {
            "mean_slowdown": statistics.fmean(pair.slowdown for pair in one.slowdowns),
            "mean_slowdown_of_needs": alike(one, bound),
            "alone_ms": {name: round(seconds * 1e3, 5) for name, seconds in one.alone_s.items()},
            "slowdown": pairs,
        }
    return flatten(nested)


def rows_of(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Every process of every window."""
    ratios = {id(one): ratio for one, ratio in slowdowns(found)}
    return [
        {
            "round": one.turn,
            "process": one.seat,
            "operator": one.operator,
            "share": one.share,
            "beside": one.beside[0] if one.beside else None,
            "latency_ms": round(one.latency_s * 1e3, 5),
            "samples": one.samples,
            **({"slowdown": round(ratios[id(one)], 4)} if one.beside else {}),
        }
        for one in found
    ]


def report(profile: InterferenceProfile, every: Mapping[str, Operator]) -> str:
    """The operators, then one table of slowdowns per division, then stages beside stages."""
    best = shares_of(profile, every)
    bound = {one.name: one.needs for one in profile.operators}
    head = [
        ("operator", "of", "FLOP/byte", "share of best FLOP/s", "of best bytes/s", "needs", *_alone_titles(profile))
    ]
    lines = [
        (
            name,
            one.stages,
            f"{one.intensity:.2g}",
            *(f"{share:.0%}" for share in best[name]),
            bound[name],
            *(f"{each.alone_s[name] * 1e3:.3f}" for each in profile.maps),
        )
        for name, one in every.items()
    ]
    parts = [f"{profile.device['name']} ({profile.device['kind']}), {profile.kind}", table([*head, *lines])]
    for one in profile.maps:
        parts += [_map_table(one), _stages(profile, one), _needs_line(one, bound)]
    return "\n\n".join(parts)


def _alone_titles(profile: InterferenceProfile) -> tuple[str, ...]:
    return tuple(f"ms alone, {label(one.core_shares)}" for one in profile.maps)


def _map_table(found: InterferenceMap) -> str:
    names = list(found.alone_s)
    rows = [(f"{label(found.core_shares)}: times slower, beside", *names)]
    rows += [(own, *(f"{found.of(own, beside).slowdown:.2f}" for beside in names)) for own in names]
    return table(rows)


def _stages(profile: InterferenceProfile, found: InterferenceMap) -> str:
    """Means over the operators typical of each stage."""
    rows: list[tuple[str, ...]] = [("stage, beside", "E", "P", "D")]
    for stage in "EPD":
        means = (profile.between(stage, beside, found.core_shares) for beside in "EPD")
        rows.append((stage, *("-" if mean is None else f"{mean:.2f}" for mean in means)))
    return table(rows)


def _needs_line(found: InterferenceMap, bound: Mapping[str, str]) -> str:
    means = alike(found, bound)
    words = {"alike": "that need the same resource", "unlike": "that need different ones"}
    return "  " + ", ".join(f"pairs {words[name]}: {mean:.2f}" for name, mean in means.items())
