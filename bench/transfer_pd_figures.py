"""From samples of P→D transfers to medians, ratios within a round, named figures and the printed table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.statistic import Spread
from bench.transfer_pd_stamps import Transfer

BASE = "bulk"
"""The mode that nothing hides: what the others are held against."""


@dataclass(frozen=True)
class Case:
    """What was asked: all modes take turns in it. `together`: requests at one time."""

    transport: str
    tokens: int
    together: int

    @property
    def suffix(self) -> str:
        """What its figures' names end with: nothing for one request at a time over shared memory."""
        transport = "" if self.transport == "shm" else f"_{self.transport}"
        return transport + ("" if self.together == 1 else f"_c{self.together}")


@dataclass(frozen=True)
class Sample:
    """One request. `turn`: the round in which all modes were asked. `ttft_s`: what its client waited."""

    case: Case
    mode: str
    turn: int
    transfer: Transfer
    ttft_s: float

    def row(self) -> dict[str, Any]:
        sent = self.transfer
        return {
            "kind": "real",
            "transport": self.case.transport,
            "tokens": self.case.tokens,
            "concurrency": self.case.together,
            "mode": self.mode,
            "round": self.turn,
            "groups": list(sent.groups),
            "bytes": sent.nbytes,
            "kv_ms": _ms(sent.link_s),
            "span_ms": _ms(sent.span_s),
            "exposed_ms": _ms(sent.exposed_s),
            "overlap": round(sent.overlap, 4),
            "gb_per_s": round(sent.bytes_per_s / 1e9, 3),
            "prefill_steps": len(sent.steps),
            "prefill_ms": _ms(sum(step.ended - step.begun for step in sent.steps)),
            "ttft_ms": _ms(self.ttft_s),
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


Measure = Callable[[Sample], float]
MEASURES: dict[str, Measure] = {
    "packets": lambda sample: len(sample.transfer.packets),
    "kv_ms": lambda sample: sample.transfer.link_s * 1e3,
    "span_ms": lambda sample: sample.transfer.span_s * 1e3,
    "exposed_ms": lambda sample: sample.transfer.exposed_s * 1e3,
    "overlap": lambda sample: sample.transfer.overlap,
    "gb_per_s": lambda sample: sample.transfer.bytes_per_s / 1e9,
    "ttft_ms": lambda sample: sample.ttft_s * 1e3,
}
RATIOS = {"exposed": "exposed_ms", "kv": "kv_ms", "ttft": "ttft_ms"}


@dataclass(frozen=True)
class Cell:
    """One mode in one case: every measure, and by ratio's name what it is to bulk within a round."""

    case: Case
    mode: str
    measures: dict[str, Spread]
    over_base: dict[str, Spread]


def cells(samples: Sequence[Sample], modes: Sequence[str]) -> list[Cell]:
    """By transport and concurrency (in the order of their names' suffixes), length, and in the order of `modes`."""
    found: dict[tuple[Case, str], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.case, sample.mode), []).append(sample)
    made = [
        Cell(
            case,
            mode,
            {name: Spread.of([of(one) for one in own]) for name, of in MEASURES.items()},
            {
                name: ratio
                for name, measure in RATIOS.items()
                if (ratio := paired_ratio(own, found.get((case, BASE), ()), MEASURES[measure])) is not None
            },
        )
        for (case, mode), own in found.items()
    ]
    order = {mode: place for place, mode in enumerate(modes)}
    return sorted(made, key=lambda cell: (cell.case.suffix, cell.case.tokens, order[cell.mode]))


def paired_ratio(own: Iterable[Sample], base: Iterable[Sample], of: Measure) -> Spread | None:
    """Round by round, of the medians in it: what slows the machine down slows both of a pair. None without pairs."""
    above, below = _by_turn(own, of), _by_turn(base, of)
    ratios = [above[turn] / below[turn] for turn in above if below.get(turn)]
    return Spread.of(ratios) if ratios else None


def _by_turn(samples: Iterable[Sample], of: Measure) -> dict[int, float]:
    turns: dict[int, list[float]] = {}
    for sample in samples:
        turns.setdefault(sample.turn, []).append(of(sample))
    return {turn: statistics.median(values) for turn, values in turns.items()}


def figures(found: Iterable[Cell], prefix: str = "real") -> dict[str, float]:
    """`real_exposed_adaptive_over_bulk_1024`, `real_packets_adaptive_1024`, `real_overlap_1024_adaptive`, …; other
    transports and concurrencies have a suffix (`Case.suffix`)."""
    named: dict[str, float] = {}
    for cell in found:
        mode, tokens, suffix = cell.mode.replace(":", ""), cell.case.tokens, cell.case.suffix
        for name, spread in cell.measures.items():
            which = f"{tokens}_{mode}" if name == "overlap" else f"{mode}_{tokens}"
            named[f"{prefix}_{name}_{which}{suffix}"] = spread.median
        if cell.mode != BASE:
            for name, ratio in cell.over_base.items():
                stem = f"{prefix}_{name}_{mode}_over_{BASE}_{tokens}{suffix}"
                named |= {stem: ratio.median, f"{stem}_p25": ratio.p25, f"{stem}_p75": ratio.p75}
    return named


def lines(found: Iterable[Cell], waited: str = "TTFT") -> list[tuple[str, ...]]:
    """Rows of the printed table of one transport and concurrency: medians, quartiles where they matter.

    `waited`: what the whole of a request's time is called.
    """
    rows: list[tuple[str, ...]] = [
        (
            "tokens",
            "mode",
            "packets",
            "KV ms",
            "first packet to DONE ms",
            "exposed ms",
            "overlap",
            "GB/s",
            f"exposed / {BASE}",
            f"{waited} ms",
            f"{waited} / {BASE}",
        )
    ]
    for cell in found:
        of = cell.measures
        exposed, ttft = (cell.over_base.get(name) for name in ("exposed", "ttft"))
        rows.append(
            (
                str(cell.case.tokens),
                cell.mode,
                f"{of['packets'].median:g}",
                f"{of['kv_ms']:.1f}",
                f"{of['span_ms'].median:.1f}",
                f"{of['exposed_ms']:.2f}",
                f"{of['overlap'].median:.1%}",
                f"{of['gb_per_s'].median:.2f}",
                f"{exposed:.2f}" if exposed else "",
                f"{of['ttft_ms'].median:.0f}",
                f"{ttft:.2f}" if ttft else "",
            )
        )
    return rows
