"""From samples of E→P transfers to exposed time and overlap, as design §6 defines them. Pure.

transfer  = admission, with a request that was waiting already, minus the end of encoding: nothing hides anything
exposed   = (admission time) - (admission time of the same request with its feature already local)
overlap   = 1 - exposed / transfer
scheduling = from the end of encoding to the moment at which P could admit the request if its feature were local
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.statistic import Spread


@dataclass(frozen=True)
class PrefillModel:
    """How long P has other things to do, as a scheduling latency. `of` gives it for a picture, in seconds."""

    name: str
    scheduling_s: Mapping[str, float]


@dataclass(frozen=True)
class Sample:
    """One feature sent. Times are seconds.

    Attributes:
        model: the `PrefillModel`, or "" for a request that waits already (then `exposed_s` is the transfer time).
        exposed_s: as defined above; one sample may be negative by the noise of two measurements.
        load_s: the worker's copy out of the arena. It comes after admission, with a local feature too.
    """

    mode: str
    picture: str
    tokens: int
    model: str
    round: int
    scheduling_s: float
    exposed_s: float
    load_s: float

    def row(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "picture": self.picture,
            "tokens": self.tokens,
            "prefill": self.model or "waiting",
            "round": self.round,
            "scheduling_ms": round(self.scheduling_s * 1e3, 4),
            "transfer_ms" if not self.model else "exposed_ms": round(self.exposed_s * 1e3, 4),
            "load_ms": round(self.load_s * 1e3, 4),
        }


@dataclass(frozen=True)
class Cell:
    """One mode, one picture, one model of P. Milliseconds."""

    mode: str
    picture: str
    tokens: int
    model: str
    scheduling_ms: float
    transfer_ms: Spread
    exposed_ms: Spread
    load_ms: Spread

    @property
    def overlap(self) -> float:
        """Of the medians, between 0 and 1: beyond them lies the noise of two measurements that were subtracted."""
        return min(1.0, max(0.0, 1.0 - self.exposed_ms.median / self.transfer_ms.median))


def cells(samples: Sequence[Sample]) -> list[Cell]:
    """One cell per mode, picture and model of P; by model, then size of the picture, then mode."""
    transfers: dict[tuple[str, str], list[Sample]] = {}
    exposed: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        if sample.model:
            exposed.setdefault((sample.mode, sample.picture, sample.model), []).append(sample)
        else:
            transfers.setdefault((sample.mode, sample.picture), []).append(sample)
    found = [
        Cell(
            mode,
            picture,
            own[0].tokens,
            model,
            own[0].scheduling_s * 1e3,
            Spread.of([1e3 * sample.exposed_s for sample in transfers[mode, picture]]),
            Spread.of([1e3 * sample.exposed_s for sample in own]),
            Spread.of([1e3 * sample.load_s for sample in own]),
        )
        for (mode, picture, model), own in exposed.items()
    ]
    return sorted(found, key=lambda cell: (cell.model, cell.tokens, cell.mode))


def figures(found: Sequence[Cell]) -> dict[str, float]:
    """`transfer_ms_4k_arena`, `exposed_ms_4k_arena`, `overlap_4k_arena`; other models of P get a suffix."""
    named: dict[str, float] = {}
    for cell in found:
        which = f"{cell.picture}_{cell.mode}"
        suffix = "" if cell.model == BUSY else f"_{cell.model}"
        named[f"transfer_ms_{which}"] = cell.transfer_ms.median
        named[f"scheduling_ms_{which}{suffix}"] = cell.scheduling_ms
        named[f"exposed_ms_{which}{suffix}"] = max(0.0, cell.exposed_ms.median)
        named[f"overlap_{which}{suffix}"] = cell.overlap
    return named


BUSY = "busy"


def lines(found: Sequence[Cell], paper: Mapping[str, tuple[float, float]]) -> list[tuple[str, ...]]:
    """Rows of the printed table, the paper's transfer and overlap beside ours."""
    rows: list[tuple[str, ...]] = [
        (
            "P",
            "picture",
            "tokens",
            "mode",
            "transfer ms",
            "scheduling",
            "exposed ms",
            "overlap",
            "load",
            "paper's transfer, overlap",
        ),
    ]
    for cell in found:
        transfer_ms, overlap = paper.get(cell.picture, (0.0, 0.0))
        theirs = f"{transfer_ms:.1f}, {overlap:.2%}" if cell.model == BUSY and transfer_ms else ""
        rows.append(
            (
                cell.model,
                cell.picture,
                str(cell.tokens),
                cell.mode,
                f"{cell.transfer_ms:.2f}",
                f"{cell.scheduling_ms:.1f}",
                f"{cell.exposed_ms:.3f}",
                f"{cell.overlap:.2%}",
                f"{cell.load_ms.median:.2f}",
                theirs,
            )
        )
    return rows
