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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import interference_map
from bench.interference_process import OperatorProcess
from bench.interference_report import figures_of, report, rows_of, shares_of
from bench.interference_windows import Found, latency_s, maps, overlapping, windows
from bench.record import add_arguments as add_record_arguments
from bench.record import busy, environment, write
from bench.shares import orders_of, parse_shares
from epd_serve.errors import ConfigError, StageError
from npu_ops.discovery import DeviceInventory, DiscoveryError, discover
from npu_ops.interference import Operator, default_sizes, needs, operators
from npu_ops.interference_profile import InterferenceProfile, ProfiledOperator, Shares
from npu_ops.properties import read_properties

LEAD_S = 0.1
"""Both run for so long before anything counts."""

TRIES = 6
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
    env = environment(argv, asked=arguments) | {"device": f"{target.kind}: {target.name}"}
    found = measure(target, list(every), divisions, rounds, seconds)
    profile = profile_of(target, every, found, env)
    print("\n\n".join(filter(None, (report(profile, every), busy(env)))), flush=True)
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
        orders = orders_of(target.kind, shares) if shares else (None, None)
        sizes = default_sizes(target.kind)
        self._seats: list[OperatorProcess] = []
        self._repeats: list[dict[str, int]] = []
        self._names = names
        with contextlib.ExitStack() as stack:
            for order in orders:
                seat = OperatorProcess(target.kind, target.index, sizes, order)
                stack.callback(seat.stop)
                self._seats.append(seat)
            self._ends = stack.pop_all()

    def __enter__(self) -> _Pair:
        try:
            granted = [seat.ready() for seat in self._seats]
            if any(granted):
                print(f"with core shares the processes have: {'; '.join(granted)}", flush=True)
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
