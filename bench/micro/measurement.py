"""What every measurement here is: flags, rows that are measured one by one, figures and tables that follow from them.

Owns the order of a run: check, measure, print, write. A row is printed now and then while it lasts, at its end
every figure beside its goal; what single samples were is in the record. What was measured before an error or Ctrl-C is
written too. Also what measurements share: flags with numbers and names in lists, defaults that `--quick` lowers, turns
by rounds.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from bench import record
from bench.micro.rows import Row as Row
from bench.micro.rows import figure_table
from deploy.memory.placement_table import table


@dataclass(frozen=True)
class Goal:
    """What a figure should be. `why` where the number comes from."""

    figure: str
    sense: Literal["<=", ">=", "=="]
    value: float
    why: str = ""

    def met(self, found: float) -> bool:
        return {"<=": found <= self.value, ">=": found >= self.value, "==": found == self.value}[self.sense]


def goal_table(figures: Mapping[str, float], goals: tuple[Goal, ...]) -> str:
    """One row per goal; a figure that was not measured says so instead of vanishing."""
    rows: list[tuple[str, ...]] = [("figure", "found", "goal", "", "where the goal comes from")]
    for goal in goals:
        found = figures.get(goal.figure)
        verdict = "not measured" if found is None else "met" if goal.met(found) else "MISSED"
        rows.append(
            (goal.figure, "" if found is None else f"{found:.4g}", f"{goal.sense} {goal.value:g}", verdict, goal.why)
        )
    return table(rows)


T = TypeVar("T")
Flag = Mapping[str, Any]

LEAST_ROUNDS = 2
PRINT_EVERY_S = 2.0
"""Between two rows that are printed."""


@dataclass(frozen=True)
class Usually:
    """A default that `--quick` lowers. Its text is what `%(default)s` shows in a help."""

    usual: Any
    quick: Any

    def __str__(self) -> str:
        return "{}, quick {}".format(*map(listed, (self.usual, self.quick)))


def listed(value: object) -> str:
    """A default as its flag would be given."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def whole(least: int = 1, most: float = float("inf")) -> Callable[[str], int]:
    """The type of a flag that takes a whole number within these bounds."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number, at least {least} and at most {most:g}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """The type of a flag that takes a number above 0."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: has to be above 0")
    return value


def one_of(*names: str) -> Callable[[str], str]:
    """The type of a flag that takes one of these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def several(of: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """The type of a flag that takes a comma-separated list; what stands twice in it counts once."""
    return lambda text: tuple(dict.fromkeys(map(of, text.split(","))))


def flag(help: str, default: Any = None, type: Callable[[str], Any] = str, **more: Any) -> Flag:
    """A row of a measurement's table of flags: what `ArgumentParser.add_argument` takes. The default is in the help."""
    shown = "" if default is None else f" (default {listed(default)})"
    return {"help": f"{help}{shown}", "default": default, "type": type, **more}


def in_turns(
    kinds: Sequence[T], rounds: int, budget_s: float = float("inf"), shown: str = ""
) -> Iterator[tuple[int, T]]:
    """(round, kind): all kinds in each round, in an order drawn for it; what slows the machine down meets all alike.

    Args:
        budget_s: after so long no further round is begun, once there are `LEAST_ROUNDS`.
        shown: what is measured, for a line after each round.
    """
    end = time.monotonic() + budget_s
    for turn in range(rounds):
        begun = time.monotonic()
        if turn >= LEAST_ROUNDS and begun > end:
            print(f"a slow or busy machine: {turn} rounds instead of {rounds}", flush=True)
            return
        yield from ((turn, kind) for kind in random.Random(turn).sample(kinds, len(kinds)))
        if shown:
            took_s, load = time.monotonic() - begun, os.getloadavg()[0]
            print(f"{shown}: round {turn + 1} of {rounds}, {took_s:.0f} s (load {load:.1f})", flush=True)


def _real(arguments: argparse.Namespace) -> Mapping[str, str]:
    return {"kind": "real"}


def _nothing(*_: object) -> None:
    """Nothing more."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement of `epd-bench`.

    Attributes:
        quick: what `--quick` cuts, for the help.
        measure: checks what it needs (raising ConfigError), then yields a row per sample, as soon as it has it.
        figures: from rows to named numbers. tables: from rows to what is printed instead of them; both pure.
        flags: its own, by name (with its other names after a blank); add_flags: adds those that it shares with others.
        settings: what `--quick` lowers without a flag.
        about: what `env` says of the run: `kind`, a device.
        goals: shown beside the figures. required: goals too; the command fails (exit 1) where one is missed.
        also: what else is made of flags, rows and `env`.
    """

    quick: str
    measure: Callable[[argparse.Namespace], Iterator[Row]]
    figures: Callable[[Sequence[Row]], dict[str, float]]
    tables: Callable[[Sequence[Row]], Iterable[str]] | None = None
    flags: Mapping[str, Flag] = field(default_factory=dict)
    add_flags: Callable[[argparse.ArgumentParser], None] = _nothing
    settings: Mapping[str, Usually] = field(default_factory=dict)
    about: Callable[[argparse.Namespace], Mapping[str, Any]] = _real
    goals: tuple[Goal, ...] = ()
    required: tuple[Goal, ...] = ()
    also: Callable[[argparse.Namespace, Sequence[Row], Mapping[str, Any]], None] = _nothing

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for names, row in self.flags.items():
            parser.add_argument(*names.split(), **row)
        self.add_flags(parser)
        parser.set_defaults(run=self.run, **self.settings)
        record.add_arguments(parser, self.quick)

    def run(self, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
        """Measure, print, write.

        Raises:
            EpdError: it cannot be measured; the rows until then are in the record, which says `incomplete`.
        """
        resolve(arguments)
        env = {**record.environment(argv, asked=arguments), **self.about(arguments)}
        rows: list[Row] = []
        with record.kept(arguments.json, env, rows):
            rows.extend(printed(self.measure(arguments)))  # one by one: an error keeps those before it
            figures = self.figures(rows)
            goals = tuple(goal for goal in (*self.goals, *self.required) if goal.figure in figures)
            named = {goal.figure for goal in goals}
            others = {name: value for name, value in figures.items() if name not in named}
            shown = [figure_table(others)] if self.tables is None else self.tables(rows)
            texts = [*shown, goal_table(figures, goals) if goals else "", env["kind"], record.busy(env)]
        print("\n" + "\n\n".join(filter(None, texts)), flush=True)
        record.write(arguments.json, figures, env, rows)
        self.also(arguments, rows, env)
        return 0 if all(goal.met(figures[goal.figure]) for goal in self.required if goal.figure in figures) else 1


def printed(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, of which one is printed now and then, by its numbers and words."""
    printed_s = 0.0
    for row in rows:
        if time.monotonic() - printed_s > PRINT_EVERY_S:
            print(*(f"{name} {value}" for name, value in row.items() if not isinstance(value, list | dict)), flush=True)
            printed_s = time.monotonic()
        yield row


def resolve(arguments: argparse.Namespace) -> None:
    """Give every flag that was left out its value, with or without `--quick`."""
    for name, value in vars(arguments).items():
        if isinstance(value, Usually):
            setattr(arguments, name, value.quick if arguments.quick else value.usual)
