"""How much operators slow each other down on one device, as `epd-bench interference` measured it: the file.

For `epd-serve profile --interference` and placement: plain JSON. Imports no framework.

    {"version": 1, "kind": "real",
     "device": {"kind": "npu", "name": "910B3", "cores": {"cube": 24}},
     "measured": {"date": …, "commit": …, …},              what ran when; free words, for people
     "operators": [{"name": "norm", "stages": "EPD", "flops": 4.2e6, "moved_bytes": 2.1e6, "needs": "memory"}, …],
     "maps": [{"core_shares": null | [0.3, 0.7],           of the operator and of its neighbour; null: none set
               "alone_s": {"norm": 1.2e-4, …},             a call without a neighbour, with that share
               "slowdowns": [{"operator": "norm", "beside": "encoder_matmul",
                              "slowdown": 1.4, "p25": 1.3, "p75": 1.5, "rounds": 5}, …]}, …]}

A slowdown is the time of a call while the neighbour runs over the time of the same call alone with the same share;
1.0 is no interference. A map has one for every ordered pair of its operators.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from epd_serve.sim.profile import checked, read_object

Shares = tuple[float, float]
"""Of a device's cores: the operator's, and its neighbour's."""


@dataclass(frozen=True)
class ProfiledOperator:
    """An operator, what one call of it does, and what it runs into first: `compute`, `memory` or `link`."""

    name: str
    stages: str
    flops: float
    moved_bytes: float
    needs: str


@dataclass(frozen=True)
class Slowdown:
    """`operator` while `beside` runs: times its latency alone, the median of `rounds`, and their quartiles."""

    operator: str
    beside: str
    slowdown: float
    p25: float
    p75: float
    rounds: int


@dataclass(frozen=True)
class InterferenceMap:
    """All ordered pairs under one division of the cores; None: none set, all compete for all."""

    core_shares: Shares | None
    alone_s: Mapping[str, float]
    slowdowns: tuple[Slowdown, ...]

    def of(self, operator: str, beside: str) -> Slowdown:
        """Raises KeyError for a pair that was not measured."""
        for one in self.slowdowns:
            if (one.operator, one.beside) == (operator, beside):
                return one
        raise KeyError((operator, beside))


@dataclass(frozen=True, kw_only=True)
class InterferenceProfile:
    """One device's. `device`: kind, name, cores. `measured`: when and with what, for people."""

    version: Literal[1]
    kind: str = "real"
    device: Mapping[str, Any]
    measured: Mapping[str, Any] = field(default_factory=dict)
    operators: tuple[ProfiledOperator, ...]
    maps: tuple[InterferenceMap, ...]

    def map_of(self, core_shares: Shares | None = None) -> InterferenceMap | None:
        """The map of that division of the cores, or None where it was not measured."""
        return next((one for one in self.maps if one.core_shares == core_shares), None)

    def between(self, stage: str, beside: str, core_shares: Shares | None = None) -> float | None:
        """What a stage (`E`, `P`, `D`) suffers beside another one: the mean slowdown of operators typical of the one
        beside those of the other, norms and elementwise work apart. An estimate: how long a stage spends in each is
        its model's to say. None where nothing of it was measured.
        """
        measured = self.map_of(core_shares)
        typical = {role: {one.name for one in self.operators if one.stages == role} for role in (stage, beside)}
        hit = [
            one.slowdown
            for one in (measured.slowdowns if measured else ())
            if one.operator in typical[stage] and one.beside in typical[beside]
        ]
        return statistics.fmean(hit) if hit else None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read_interference_profile(path: Path) -> InterferenceProfile:
    """What `InterferenceProfile.save` has written. Raises ConfigError: it cannot be read, or is of another version."""
    what = f"interference profile {path}"
    return checked(InterferenceProfile, read_object(path, what, "--interference"), what, "--interference")
