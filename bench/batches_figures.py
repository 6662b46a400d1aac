"""What `epd-bench batches` found, as figures, a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SATURATED = 0.9
"""Of a stage's best throughput."""
UNITS = {
    "encode": ("pictures/s", "ms per picture"),
    "prefill": ("prompt tokens/s", "ms per prompt"),
    "decode": ("output tokens/s", "ms between tokens"),
}


@dataclass(frozen=True)
class BatchPoint:
    """A stage with `size` requests under way: `per_s` of what it makes, and milliseconds of each."""

    stage: str
    size: int
    requests: int
    per_s: float
    each_ms: float

    def __str__(self) -> str:
        per_s, each_ms = UNITS[self.stage]
        return f"{self.stage}, {self.size} at once: {self.per_s:.1f} {per_s}, {self.each_ms:.1f} {each_ms}"

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "per_s": round(self.per_s, 4), "each_ms": round(self.each_ms, 4)}


def of_stage(points: Sequence[BatchPoint], stage: str) -> list[BatchPoint]:
    return sorted((point for point in points if point.stage == stage), key=lambda point: point.size)


def saturates_at(points: Sequence[BatchPoint]) -> int | None:
    """The least size with nearly the best throughput of these points of one stage. None where that is the largest that
    was measured: a larger one may give more."""
    best = max((point.per_s for point in points), default=0.0)
    return min((point.size for point in points[:-1] if point.per_s >= SATURATED * best), default=None)


def figures(points: Sequence[BatchPoint]) -> dict[str, float]:
    found: dict[str, float] = {}
    for stage in UNITS:
        own = of_stage(points, stage)
        for point in own:
            found[f"{stage}/{point.size}/per_s"] = round(point.per_s, 4)
            found[f"{stage}/{point.size}/each_ms"] = round(point.each_ms, 4)
        if (size := saturates_at(own)) is not None:
            found[f"{stage}/saturates_at"] = size
    return found


def lines(points: Sequence[BatchPoint]) -> list[tuple[str, ...]]:
    """Header and a row per point, with the gain over the smallest batch."""
    rows: list[tuple[str, ...]] = [("stage", "at once", "throughput", "", "times", "latency", "")]
    for stage, (per_s, each_ms) in UNITS.items():
        own = of_stage(points, stage)
        size = saturates_at(own)
        for point in own:
            times = f"{point.per_s / own[0].per_s:.2f}{' (saturated)' if point.size == size else ''}"
            rows.append((stage, str(point.size), f"{point.per_s:.1f}", per_s, times, f"{point.each_ms:.1f}", each_ms))
    return rows


def draw(path: Path, points: Sequence[BatchPoint], kind: str) -> None:
    """A panel per stage: throughput (left axis) and latency (right) against batch size. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state of pyplot's
    from matplotlib.figure import Figure

    from bench.report.style import BLUE, FAINT, VERMILLION, tidy

    stages = [stage for stage in UNITS if of_stage(points, stage)]
    figure = Figure(figsize=(4.6 * len(stages), 4.0), layout="constrained", dpi=130)
    for ax, stage in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages, strict=True):
        own, (per_s, each_ms) = of_stage(points, stage), UNITS[stage]
        sizes = [point.size for point in own]
        tidy(ax, "requests under way", "", stage)
        right = ax.twinx()
        ax.plot(sizes, [point.per_s for point in own], color=BLUE, marker="o", linewidth=1.8)
        right.plot(sizes, [point.each_ms for point in own], color=VERMILLION, marker="s", linestyle="--", linewidth=1.8)
        ax.set_ylabel(f"{per_s} (full line)", fontsize=9, color=BLUE)
        right.set_ylabel(f"{each_ms} (dashed)", fontsize=9, color=VERMILLION)
        right.tick_params(labelsize=8)
        ax.set_ylim(0, 1.1 * max(point.per_s for point in own))
        right.set_ylim(0, 1.1 * max(point.each_ms for point in own))
        if (size := saturates_at(own)) is not None:
            ax.axvline(size, color=FAINT, linestyle=":", linewidth=1.2)
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [str(size) for size in sizes])
    title = f"Throughput and latency of a stage against its batch size, 1 device each\n{kind}; dotted: saturated"
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
