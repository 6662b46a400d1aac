"""From rows to figures and tables, the same way for every measurement. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from bench.statistic import Spread
from deploy.memory.placement_table import table

T = TypeVar("T")
Row = dict[str, Any]


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of `names`, in the order in which these first occur."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def median(rows: Iterable[Row], name: str) -> float:
    return float(np.median([row[name] for row in rows]))


def spread(rows: Iterable[Row], name: str) -> Spread:
    return Spread.of([row[name] for row in rows])


def ratios(of: Iterable[Row], over: Iterable[Row], name: str, turn: str = "round") -> Spread | None:
    """One over the other round by round, of the medians in it: what slows the machine down slows both of a pair.

    None where no round has both, or the base is 0 in all.
    """
    above, below = ({key: median(own, name) for (key,), own in grouped(rows, turn).items()} for rows in (of, over))
    found = [above[key] / below[key] for key in above if below.get(key)]
    return Spread.of(found) if found else None


def quartiles(figure: str, spread: Spread, digits: int = 4) -> dict[str, float]:
    """The median under the figure's name, and `_p25` and `_p75`."""
    values = {figure: spread.median, f"{figure}_p25": spread.p25, f"{figure}_p75": spread.p75}
    return {name: round(value, digits) for name, value in values.items()}


def table_of(items: Iterable[T], columns: Mapping[str, str | Callable[[T], object]]) -> str:
    """A line per item; `columns`: what stands in it, by heading, as a function or as a template (`str.format`) of the
    item: `{0.name}` of an object, `{size}` of a row."""

    def cell(item: T, show: str | Callable[[T], object]) -> str:
        if not isinstance(show, str):
            return str(show(item))
        return show.format(item, **item) if isinstance(item, dict) else show.format(item)

    return table([tuple(columns), *(tuple(cell(item, show) for show in columns.values()) for item in items)])


def figure_table(figures: Mapping[str, float], names: Sequence[str] | None = None) -> str:
    """Figures by name, or those of `names` that there are."""
    shown = figures if names is None else [name for name in names if name in figures]
    return table([("figure", "measured"), *((name, f"{figures[name]:.4g}") for name in shown)])
