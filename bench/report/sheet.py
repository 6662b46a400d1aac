"""A table of a report: the same rows, and the same digits, as CSV and as HTML."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Cell = str | int | float | bool | None
NOTHING = "–"


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        name: of its CSV file, without the ending. title: above it.
        columns: with their units, as `TTFT mean (ms)`.
        rows: a cell per column; None where there is no number.
        note: what its reader has to know.
        faint: numbers of the rows that do not count, from 0.
        long: too long for a page: there it is in the file alone.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    faint: frozenset[int] = frozenset()
    long: bool = False

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), f"{self.name}: a cell for every column"

    def csv(self, kind: str) -> str:
        """With a last column that says what kind of measurement this is."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.columns, "kind"])
        writer.writerows([*("" if cell is None else shown(cell) for cell in row), kind] for row in self.rows)
        return text.getvalue()

    def html(self, kind: str) -> str:
        """A table element."""
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in self.columns)
        body = "\n".join(self._row(number, row) for number, row in enumerate(self.rows))
        caption = f"{escape(self.title)} <span class='kind'>{escape(kind)}</span>"
        return (
            f"<div class='wide'><table><caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n"
            f"<tbody>\n{body}\n</tbody></table></div>"
        )

    def _row(self, number: int, row: Sequence[Cell]) -> str:
        cells = []
        for place, cell in enumerate(row):
            if place == 0:
                cells.append(f'<th scope="row">{escape(shown(cell))}</th>')
            else:
                right = " class='n'" if isinstance(cell, int | float) and not isinstance(cell, bool) else ""
                cells.append(f"<td{right}>{escape(shown(cell))}</td>")
        faint = " class='faint'" if number in self.faint else ""
        return f"<tr{faint}>{''.join(cells)}</tr>"


def shown(cell: Cell) -> str:
    """What is printed of a cell, everywhere: four significant digits, or all before the point; never an exponent."""
    if cell is None:
        return NOTHING
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str | int):
        return str(cell)
    assert math.isfinite(cell), "a figure is a number, or it is not there"
    if cell == 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(abs(cell))))
    text = f"{cell:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
