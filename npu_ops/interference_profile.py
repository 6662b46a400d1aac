"""How much operators slow each other down on one device, as `epd-bench interference` found it: the file, its checks.

For placement and planners. Imports no framework. The file is JSON, `VERSION` of this form:

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

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
NEEDS = ("compute", "memory", "link")
KINDS = ("real", "emulated", "simulated")

Shares = tuple[float, float]
"""Of a device's cores: the operator's, and its neighbour's."""


class ProfileError(ValueError):
    """The profile cannot be read or says something impossible; the message names the field and what to do."""


@dataclass(frozen=True)
class ProfiledOperator:
    """An operator, what one call of it does, and the resource that it runs into first (`NEEDS`)."""

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


@dataclass(frozen=True)
class InterferenceProfile:
    """One device's. `device`: kind, name, cores. `measured`: when and with what, for people."""

    device: Mapping[str, Any]
    operators: tuple[ProfiledOperator, ...]
    maps: tuple[InterferenceMap, ...]
    kind: str = "real"
    measured: Mapping[str, Any] = field(default_factory=dict)

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
        whole = {"version": VERSION, **asdict(self)}
        order = ("version", "kind", "device", "measured", "operators", "maps")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({name: whole[name] for name in order}, indent=1) + "\n", encoding="utf-8")


def load_profile(path: Path) -> InterferenceProfile:
    """Read and check a profile.

    Raises:
        ProfileError: it cannot be read, is of another version, or a field is missing or impossible.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ProfileError(f"{path} is no JSON ({error}): make it with `epd-bench interference --profile`") from error
    try:
        return _profile(whole)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}; measure again with `epd-bench interference --profile`") from None


def _profile(whole: Any) -> InterferenceProfile:
    top = _object("the file", whole)
    version = _field("version", top, "version", int)
    if version != VERSION:
        raise ProfileError(f"version is {version}, and this EPD-Serve reads {VERSION}")
    kind = _field("kind", top, "kind", str)
    if kind not in KINDS:
        raise ProfileError(f"kind is {kind!r}: one of {', '.join(KINDS)}")
    operators = tuple(
        _operator(f"operators[{place}]", one) for place, one in enumerate(_field("operators", top, "operators", list))
    )
    names = {one.name for one in operators}
    if len(names) != len(operators) or not names:
        raise ProfileError("operators: none, or one of them twice")
    maps = tuple(_map(f"maps[{place}]", one, names) for place, one in enumerate(_field("maps", top, "maps", list)))
    if not maps:
        raise ProfileError("maps: there is none")
    device = _object("device", top.get("device"))
    measured = _object("measured", top.get("measured", {}))
    return InterferenceProfile(device, operators, maps, kind, measured)


def _operator(where: str, raw: Any) -> ProfiledOperator:
    one = _object(where, raw)
    needs = _field(where, one, "needs", str)
    if needs not in NEEDS:
        raise ProfileError(f"{where}.needs is {needs!r}: one of {', '.join(NEEDS)}")
    return ProfiledOperator(
        _field(where, one, "name", str),
        _field(where, one, "stages", str),
        _number(where, one, "flops", lambda value: value >= 0),
        _number(where, one, "moved_bytes", lambda value: value > 0),
        needs,
    )


def _map(where: str, raw: Any, names: set[str]) -> InterferenceMap:
    one = _object(where, raw)
    shares = _shares(where, one.get("core_shares"))
    alone = _object(f"{where}.alone_s", one.get("alone_s"))
    if set(alone) - names:
        raise ProfileError(f"{where}.alone_s names {min(set(alone) - names)!r}, which is not among operators")
    seconds = {name: _number(f"{where}.alone_s", alone, name, lambda value: value > 0) for name in alone}
    listed = enumerate(_field(where, one, "slowdowns", list))
    slowdowns = tuple(_slowdown(f"{where}.slowdowns[{place}]", pair, set(seconds)) for place, pair in listed)
    if len({(pair.operator, pair.beside) for pair in slowdowns}) != len(slowdowns):
        raise ProfileError(f"{where}.slowdowns holds a pair twice")
    if len(slowdowns) != len(seconds) ** 2:
        raise ProfileError(f"{where}.slowdowns holds {len(slowdowns)} of {len(seconds) ** 2} ordered pairs")
    return InterferenceMap(shares, seconds, slowdowns)


def _shares(where: str, raw: Any) -> Shares | None:
    if raw is None:
        return None
    if not (isinstance(raw, list) and len(raw) == 2 and all(_is_number(share) and 0 < share <= 1 for share in raw)):
        raise ProfileError(f"{where}.core_shares is {raw!r}: null, or two numbers above 0 and up to 1")
    return float(raw[0]), float(raw[1])


def _slowdown(where: str, raw: Any, names: set[str]) -> Slowdown:
    one = _object(where, raw)
    pair = [_field(where, one, name, str) for name in ("operator", "beside")]
    for name in pair:
        if name not in names:
            raise ProfileError(f"{where} names {name!r}, of which alone_s says nothing")
    quartiles = [_number(where, one, name, lambda value: value > 0) for name in ("slowdown", "p25", "p75")]
    if not quartiles[1] <= quartiles[0] <= quartiles[2]:
        raise ProfileError(f"{where}: the median {quartiles[0]:g} lies outside of its quartiles")
    rounds = _field(where, one, "rounds", int)
    if rounds < 1:
        raise ProfileError(f"{where}.rounds is {rounds}: at least 1")
    return Slowdown(pair[0], pair[1], quartiles[0], quartiles[1], quartiles[2], rounds)


def _object(where: str, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ProfileError(f"{where} is no JSON object")
    return raw


def _field(where: str, raw: Mapping[str, Any], name: str, kind: type) -> Any:
    value = raw.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProfileError(f"{where}: {name} is {'missing' if name not in raw else 'no ' + kind.__name__}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(where: str, raw: Mapping[str, Any], name: str, holds: Callable[[float], bool]) -> float:
    value = raw.get(name)
    if not _is_number(value) or not holds(value):  # type: ignore[arg-type]
        raise ProfileError(f"{where}.{name} is {value!r}, which no such number is")
    return float(value)  # type: ignore[arg-type]
