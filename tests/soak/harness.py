"""What every soak test is: minutes of a scenario, figures that follow, and goals for them.

Each is a command, `python -m tests.soak.NAME [--quick] [--json FILE]`, that ends with 1 where a goal is missed, and a
slow test that runs the quick form.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.micro.measurement import Goal, goal_table
from bench.record import environment, write
from deploy.memory.placement_table import table

Result = tuple[Mapping[str, float], Sequence[Mapping[str, Any]], str]
"""Figures, rows of the record, and what is printed besides."""


@dataclass(frozen=True)
class Soak:
    """A scenario.

    Attributes:
        name: of its module. what: a line of help.
        measure: runs it, with the flags of the command line.
        goals: hold on any machine. speed_goals: hold on one that does nothing else; the command's to judge.
        flags: adds the scenario's own flags.
        kind: what of it is real, for the record.
    """

    name: str
    what: str
    measure: Callable[[argparse.Namespace], Result]
    goals: tuple[Goal, ...]
    speed_goals: tuple[Goal, ...] = ()
    flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    kind: str = "simulated stages, real front door"

    def run(self, argv: Sequence[str]) -> dict[str, float]:
        """Measure, print, write; returns the figures."""
        command = f"python -m tests.soak.{self.name}"
        parser = argparse.ArgumentParser(prog=command, description=self.what)
        parser.add_argument("--quick", action="store_true", help="a minute or two instead of many")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, environment and rows there")
        self.flags(parser)
        arguments = parser.parse_args(argv)
        env = environment(argv, self.kind, asked=arguments)
        figures, rows, text = self.measure(arguments)
        lines = [("figure", "measured"), *((name, f"{value:g}") for name, value in figures.items())]
        print(f"{table(lines)}\n\n{text}\n\n{goal_table(figures, self.goals + self.speed_goals)}")
        write(arguments.json, figures, env | {"command": " ".join([command, *argv])}, rows)
        return dict(figures)

    def missed(self, figures: Mapping[str, float], *, speed: bool) -> list[str]:
        """Returns the figures whose goal is missed. A goal of a part that was not asked for is none."""
        goals = self.goals + (self.speed_goals if speed else ())
        return [one.figure for one in goals if one.figure in figures and not one.met(figures[one.figure])]

    def main(self) -> int:
        return 1 if self.missed(self.run(sys.argv[1:]), speed=True) else 0
