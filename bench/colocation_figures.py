"""From rounds of layouts to the figures of `epd-bench colocation`, beside what EPD-Serve reports. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.colocation_mix import Round
from bench.statistic import Spread
from deploy.placement_table import table

VALUES = ("tput", "tpot", "ttft")


@dataclass(frozen=True)
class Versus:
    """Two layouts held against each other. `figure`: how their names appear in the figures' names."""

    figure: str
    of: str
    over: str


PAPER = {
    "tput_E_PD_over_TP1": "1.13-1.15 (4.3: openPangu-7B-VL, 12 requests/s; Qwen3-VL-8B 1.07-1.09)",
    "tpot_E_PD_over_TP1": "0.30 (4.3: openPangu-7B-VL; Qwen3-VL-8B 0.85-0.87)",
    "ttft_E_PD_over_TP1": "0.97 (4.3: openPangu-7B-VL; Qwen3-VL-8B 0.91-0.92)",
    "tput_E_P_D_over_EP_D": "1.57-1.69 (4.4: effective throughput, within TTFT 2 s and TPOT 50 ms)",
}
"""On Ascend NPUs. The paper has no figure for the storm."""


@dataclass(frozen=True)
class StormRound:
    """A decode stream alone and under a storm of pictures, on one launch. Mean TPOTs in seconds."""

    name: str
    turn: int
    solo_s: float
    storm_s: float
    encodes_per_s: float

    @property
    def ratio(self) -> float:
        return self.storm_s / self.solo_s

    def row(self) -> dict[str, Any]:
        return {
            "layout": self.name,
            "round": self.turn,
            "storm": True,
            "solo_tpot_ms": round(self.solo_s * 1e3, 3),
            "storm_tpot_ms": round(self.storm_s * 1e3, 3),
            "encodes_per_s": round(self.encodes_per_s, 3),
        }


def ratios(rounds: Sequence[Round], versus: Versus) -> dict[str, Spread]:
    """Per value, one layout over the other in the same round: median and quartiles over rounds."""
    by_turn: dict[int, dict[str, dict[str, float]]] = {}
    for one in rounds:
        by_turn.setdefault(one.turn, {})[one.name] = one.values()
    both = [found for found in by_turn.values() if {versus.of, versus.over} <= set(found)]
    assert both, f"no round has both {versus.of} and {versus.over}"
    return {
        value: Spread.of([found[versus.of][value] / found[versus.over][value] for found in both]) for value in VALUES
    }


def figures(rounds: Sequence[Round], against: Sequence[Versus]) -> dict[str, float]:
    """Named `tput_E_PD_over_TP1`, with `_p25` and `_p75`; then each layout's medians."""
    found: dict[str, float] = {}
    for versus in against:
        for value, spread in ratios(rounds, versus).items():
            found |= _named(f"{value}_{versus.figure}", spread)
    for name, values in medians(rounds).items():
        found |= {f"{name}/{value}": number for value, number in values.items()}
    return found


def storm_figures(storms: Sequence[StormRound], plain: str, shared: str) -> dict[str, float]:
    """`tpot_under_encode_storm_over_solo`, `…_with_core_share`, and what the shares themselves cost."""
    found: dict[str, float] = {}
    for name, suffix in ((plain, ""), (shared, "_with_core_share")):
        own = [one for one in storms if one.name == name]
        if own:
            found |= _named(f"tpot_under_encode_storm_over_solo{suffix}", Spread.of([one.ratio for one in own]))
            found[f"{name}/solo_tpot_ms"] = round(statistics.median(one.solo_s for one in own) * 1e3, 3)
            found[f"{name}/storm_tpot_ms"] = round(statistics.median(one.storm_s for one in own) * 1e3, 3)
            found[f"{name}/storm_encodes_per_s"] = round(statistics.median(one.encodes_per_s for one in own), 3)
    base = {one.turn: one for one in storms if one.name == plain}
    pairs = [(one, base[one.turn]) for one in storms if one.name == shared and one.turn in base]
    if pairs:
        for figure, spread in (
            ("tpot_under_encode_storm_shares_over_none", [own.storm_s / other.storm_s for own, other in pairs]),
            ("tpot_solo_shares_over_none", [own.solo_s / other.solo_s for own, other in pairs]),
            ("storm_encodes_shares_over_none", [own.encodes_per_s / other.encodes_per_s for own, other in pairs]),
        ):
            found |= _named(figure, Spread.of(spread))
    return found


def medians(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Per layout: output tokens a second, mean TPOT and TTFT in ms, CPU seconds; medians over rounds."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(one.name for one in rounds):
        own = [one for one in rounds if one.name == name]
        values = [one.values() for one in own]
        found[name] = {
            "tokens_per_s": round(statistics.median(one["tput"] for one in values), 3),
            "tpot_ms": round(statistics.median(one["tpot"] for one in values) * 1e3, 3),
            "ttft_ms": round(statistics.median(one["ttft"] for one in values) * 1e3, 2),
            "cpu_s": round(statistics.median(one.cpu_s for one in own), 3),
            "cores_of_others": round(statistics.median(one.others_cpu_s / one.seconds for one in own), 4),
        }
    return found


def layouts_table(rounds: Sequence[Round]) -> str:
    lines: list[tuple[str, ...]] = [
        ("layout", "output tokens/s", "mean TPOT ms", "mean TTFT ms", "CPU s a round", "cores that the others used")
    ]
    for name, one in medians(rounds).items():
        shown = (one["tokens_per_s"], one["tpot_ms"], one["ttft_ms"], one["cpu_s"])
        lines.append((name, *(f"{value:.1f}" for value in shown), f"{one['cores_of_others']:.3f}"))
    return table(lines)


def ratio_table(found: Mapping[str, float]) -> str:
    """Every figure that has quartiles, beside the paper's."""
    lines: list[tuple[str, ...]] = [("figure", "found (quartiles)", "EPD-Serve, on NPUs")]
    for name in found:
        if f"{name}_p25" in found:
            spread = Spread(found[name], found[f"{name}_p25"], found[f"{name}_p75"])
            lines.append((name, f"{spread:.2f}", PAPER.get(name, "")))
    return table(lines)


def _named(figure: str, spread: Spread) -> dict[str, float]:
    return {
        figure: round(spread.median, 4),
        f"{figure}_p25": round(spread.p25, 4),
        f"{figure}_p75": round(spread.p75, 4),
    }
