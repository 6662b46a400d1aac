"""A comparison as a table for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from bench.compare.compared import Compared
from deploy.placement_table import table

HEAD = ("figure", "A", "B", "B/A", "95 %", "over", "B is")


def shown(found: Sequence[Compared], *, everything: bool = False) -> str:
    """A table per entry and run. Figures that are neither good nor bad, or 0 in both, only where all are wanted."""
    parts = []
    for (entry, run), group in groupby(found, key=lambda one: (one.entry, one.run)):
        rows = [_line(one) for one in group if everything or (one.better and (one.a or one.b))]
        if rows:
            title = ", ".join(filter(None, (entry, run)))
            parts.append((f"{title}\n" if title else "") + table([HEAD, *rows]))
    return "\n\n".join(parts) or "  no figure with a direction; --all shows the others"


def summary(found: Sequence[Compared]) -> str:
    """What the intervals say, in a line or a few."""
    judged = [one for one in found if one.better]
    counts = {word: sum(one.verdict == word for one in judged) for word in ("better", "worse", "no difference shown")}
    without = sum(one.verdict == "no interval" for one in judged)
    lines = [
        f"  B is better in {counts['better']} figures, worse in {counts['worse']}; no difference shown in "
        f"{counts['no difference shown']}; {without} have no interval."
    ]
    if any(one.interval for one in found):
        lines.append(
            "  Intervals are of the requests or rows of these two results (95 %, each by itself: one in twenty leaves "
            "out 1 by chance).\n  What changes from one run to the next is not in them: repeat both in turns to know."
        )
    if reasons := _reasons(judged):
        lines.append(f"  No interval: {reasons}.")
    return "\n".join(lines)


def _reasons(found: Iterable[Compared]) -> str:
    counts: dict[str, int] = {}
    for one in found:
        if one.interval is None and one.why:
            counts[one.why] = counts.get(one.why, 0) + 1
    return "; ".join(f"{why} ({count})" for why, count in counts.items())


def _line(one: Compared) -> tuple[str, ...]:
    ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
    low_high = "-" if one.interval is None else f"{one.interval[0]:.3f}–{one.interval[1]:.3f}"
    counted = f"{min(one.samples)} {one.over}" if one.over else "-"
    return one.name, f"{one.a:.4g}", f"{one.b:.4g}", ratio, low_high, counted, one.verdict or "-"
