"""What every measurement here is: flags, rows that are measured one by one, figures and tables that follow from them.

Owns the order of a run: check, measure, print, write, draw. What was measured before an error or Ctrl-C is written too.
Also the flags that measurements share: numbers and names in lists, and defaults that `--quick` lowers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench import record
from bench.goals import Goal, goal_table
from bench.micro.charts import check_plot

T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True)
class Usually:
    """A default that `--quick` lowers. Its text is what `%(default)s` shows in a help."""

    usual: Any
    quick: Any

    def __str__(self) -> str:
        usual, quick = (
            ",".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in (self.usual, self.quick)
        )
        return f"{usual}, quick {quick}"


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
        figures: from rows to named numbers. tables: from rows to what is printed; both pure.
        flags: adds its own flags. about: what `env` says of the run: `kind`, a device.
        goals: shown beside the figures. required: goals too; the command fails (exit 1) where one is missed.
        plot: draws the rows into a file, under a heading; there is a flag `--plot` then.
        also: what else is made of flags, rows and `env`.
    """

    quick: str
    measure: Callable[[argparse.Namespace], Iterator[Row]]
    figures: Callable[[Sequence[Row]], dict[str, float]]
    tables: Callable[[Sequence[Row]], Iterable[str]]
    flags: Callable[[argparse.ArgumentParser], None] = _nothing
    about: Callable[[argparse.Namespace], Mapping[str, str]] = _real
    goals: tuple[Goal, ...] = ()
    required: tuple[Goal, ...] = ()
    plot: Callable[[Path, Sequence[Row], str], None] | None = None
    also: Callable[[argparse.Namespace, Sequence[Row], Mapping[str, Any]], None] = _nothing

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        self.flags(parser)
        if self.plot is not None:
            parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it there (needs matplotlib)")
        record.add_arguments(parser, self.quick)
        parser.set_defaults(run=self.run)

    def run(self, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
        """Measure, print, write, draw.

        Raises:
            EpdError: it cannot be measured; the rows until then are in the record, which says `incomplete`.
        """
        resolve(arguments)
        if self.plot is not None and arguments.plot is not None:
            check_plot(arguments.plot)
        env = {**record.environment(argv, asked=arguments), **self.about(arguments)}
        rows: list[Row] = []
        with record.kept(arguments.json, env, rows):
            for row in self.measure(arguments):
                rows.append(row)  # noqa: PERF402  (one by one: an error keeps those before it)
            figures = self.figures(rows)
            goals = tuple(goal for goal in (*self.goals, *self.required) if goal.figure in figures)
            goal_text = goal_table(figures, goals) if goals else ""
            texts = [*self.tables(rows), goal_text, env["kind"], record.busy(env)]
        print("\n" + "\n\n".join(filter(None, texts)), flush=True)
        record.write(arguments.json, figures, env, rows)
        if self.plot is not None and arguments.plot is not None:
            self.plot(arguments.plot, rows, env["kind"])
        self.also(arguments, rows, env)
        return 0 if all(goal.met(figures[goal.figure]) for goal in self.required if goal.figure in figures) else 1


def resolve(arguments: argparse.Namespace) -> None:
    """Give every flag that was left out its value, with or without `--quick`."""
    for name, value in vars(arguments).items():
        if isinstance(value, Usually):
            setattr(arguments, name, value.quick if arguments.quick else value.usual)
