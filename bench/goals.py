"""Goals of the figures, and the table that says which are met. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
