"""What `epd-bench interference` prints and records of a profile. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.interference_map import intensity
from bench.interference_windows import Found, alike, slowdowns
from bench.record import flatten
from deploy.placement_table import table
from npu_ops.interference import Operator, shares_of_best
from npu_ops.interference_profile import InterferenceMap, InterferenceProfile, Shares


def shares_of(profile: InterferenceProfile, every: Mapping[str, Operator]) -> dict[str, tuple[float, float]]:
    return shares_of_best(every, profile.maps[0].alone_s)


def label(division: Shares | None) -> str:
    return "all cores" if division is None else f"share {division[0]:g} beside {division[1]:g}"


def figures_of(profile: InterferenceProfile) -> dict[str, float]:
    """Per division: time alone, every slowdown, and the means of pairs with the same and with different needs."""
    bound = {one.name: one.needs for one in profile.operators}
    nested: dict[str, Any] = {}
    for one in profile.maps:
        pairs: dict[str, dict[str, float]] = {}
        for pair in one.slowdowns:
            pairs.setdefault(pair.operator, {})[pair.beside] = pair.slowdown
        nested[label(one.core_shares)] = {
            "mean_slowdown": statistics.fmean(pair.slowdown for pair in one.slowdowns),
            "mean_slowdown_of_needs": alike(one, bound),
            "alone_ms": {name: round(seconds * 1e3, 5) for name, seconds in one.alone_s.items()},
            "slowdown": pairs,
        }
    return flatten(nested)


def rows_of(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Every process of every window."""
    ratios = {id(one): ratio for one, ratio in slowdowns(found)}
    return [
        {
            "round": one.turn,
            "process": one.seat,
            "operator": one.operator,
            "share": one.share,
            "beside": one.beside[0] if one.beside else None,
            "latency_ms": round(one.latency_s * 1e3, 5),
            "samples": one.samples,
            **({"slowdown": round(ratios[id(one)], 4)} if one.beside else {}),
        }
        for one in found
    ]


def report(profile: InterferenceProfile, every: Mapping[str, Operator]) -> str:
    """The operators, then one table of slowdowns per division, then stages beside stages."""
    best = shares_of(profile, every)
    bound = {one.name: one.needs for one in profile.operators}
    head = [
        ("operator", "of", "FLOP/byte", "share of best FLOP/s", "of best bytes/s", "needs", *_alone_titles(profile))
    ]
    lines = [
        (
            name,
            one.stages,
            intensity(one.intensity).split()[0],
            *(f"{share:.0%}" for share in best[name]),
            bound[name],
            *(f"{each.alone_s[name] * 1e3:.3f}" for each in profile.maps),
        )
        for name, one in every.items()
    ]
    parts = [f"{profile.device['name']} ({profile.device['kind']}), {profile.kind}", table([*head, *lines])]
    for one in profile.maps:
        parts += [_map_table(one), _stages(profile, one), _needs_line(one, bound)]
    return "\n\n".join(parts)


def _alone_titles(profile: InterferenceProfile) -> tuple[str, ...]:
    return tuple(f"ms alone, {label(one.core_shares)}" for one in profile.maps)


def _map_table(found: InterferenceMap) -> str:
    names = list(found.alone_s)
    rows = [(f"{label(found.core_shares)}: times slower, beside", *names)]
    rows += [(own, *(f"{found.of(own, beside).slowdown:.2f}" for beside in names)) for own in names]
    return table(rows)


def _stages(profile: InterferenceProfile, found: InterferenceMap) -> str:
    """Means over the operators typical of each stage."""
    rows: list[tuple[str, ...]] = [("stage, beside", "E", "P", "D")]
    for stage in "EPD":
        means = (profile.between(stage, beside, found.core_shares) for beside in "EPD")
        rows.append((stage, *("-" if mean is None else f"{mean:.2f}" for mean in means)))
    return table(rows)


def _needs_line(found: InterferenceMap, bound: Mapping[str, str]) -> str:
    means = alike(found, bound)
    words = {"alike": "that need the same resource", "unlike": "that need different ones"}
    return "  " + ", ".join(f"pairs {words[name]}: {mean:.2f}" for name, mean in means.items())
