"""Whether two results may be compared: what forbids it, and what has to be known beside it. Pure.

Forbidden is what makes a ratio meaningless: another kind (real, emulated, simulated), another measurement, other
requests, other objectives. Another machine or commit may be the very thing that is compared, so it is only told.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bench.analysis.results import ASKED, Result
from bench.clients.resume import difference
from bench.record import busy

_WHERE = frozenset("json rows out plot cache traces resume url header report output".split())
"""Flags that say where things are."""
_MORE = frozenset(
    "quick n requests rounds round repeats duration seconds warmup pause layouts only without modes real layout "
    "entries".split()
)
"""Flags that say how much is measured, or which parts: figures that both have can still be compared."""
_JUDGING = frozenset("devices kind min_samples late_ms".split())
"""Fields of a load's experiment that say what serves, and what a valid run is."""


def refusals(a: Result, b: Result) -> list[str]:
    """Why they cannot be compared, each with the field at fault; empty where they can."""
    found = []
    if a.kind != b.kind:
        found.append(f"kind: A is {a.kind}, B is {b.kind}")
    left, right = (one.env.get("load") for one in (a, b))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return found + list(_load(left, right))
    if (first := _measurement(a)) != (second := _measurement(b)):
        return [*found, f"measurement: A is {first!r}, B is {second!r}"]
    return found + [text for name, text in _flags(a, b) if name not in _MORE]


def warnings(a: Result, b: Result) -> list[str]:
    """What a reader of the ratios has to know."""
    return list(dict.fromkeys([*_between(a, b), *_within("A", a), *_within("B", b)]))


def _between(a: Result, b: Result) -> Iterator[str]:
    for name, one, other in _differing(a.env.get("machine", {}), b.env.get("machine", {}), ("cpu", "cores", "arch")):
        yield f"different machines: {name} {one} and {other}"
    for name, one, other in _differing(a.env, b.env, ("commit",)):
        yield f"different {name}s: {one} and {other}"
    first, second = (one.env.get("versions", {}) for one in (a, b))
    if changed := _differing(first, second, sorted({*first, *second})):
        yield "different versions: " + ", ".join(f"{name} {one} and {other}" for name, one, other in changed)
    if a.devices != b.devices:
        yield f"different device counts: {a.devices} and {b.devices}; throughput is compared per device"
    if not ("load" in a.env and "load" in b.env):
        yield from (text for name, text in _flags(a, b) if name in _MORE)


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], names: Iterable[str]) -> list[tuple[str, Any, Any]]:
    """(name, value in A, value in B) of those that differ."""
    return [(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]


def _within(side: str, one: Result) -> Iterator[str]:
    env = one.env
    if env.get("uncommitted_changes"):
        yield f"{side} was measured with uncommitted changes"
    if {"load_average_1min", "cores"} <= env.get("machine", {}).keys() and (text := busy(env)):
        yield f"{side}: {text}"
    if env.get("resumed") or len(env.get("sessions", ())) > 1:
        yield f"{side} was measured in several sessions"
    for row in one.rows:
        if row.get("valid") is False:
            yield f"{side}: {row.get('run')} is not valid: {next(iter(row.get('objections', [])), 'no reason kept')}"
        if row.get("grows"):
            yield f"{side}: {row.get('run')} is no steady state, so its figures depend on how long it was"
    load = env.get("load")
    if isinstance(load, Mapping) and load.get("client_on_the_servers_host"):
        yield "the client ran on the server's host, and shared its cores"


def _load(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """What differs of two loads, but how many devices served them, and what a valid run is."""
    left, right = a.get("experiment"), b.get("experiment")
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        asked = [{name: value for name, value in one.items() if name not in _JUDGING} for one in (left, right)]
        if other := difference(*asked):
            yield f"experiment: {other} (A, B)"
        return
    for name, first, second in _differing(a, b, (*ASKED, "model")):
        if name in a and name in b:
            yield f"{name}: A has {first}, B has {second}"


def _measurement(one: Result) -> str:
    """`ttft`, or `transfer pd`: the words of the command before its flags."""
    words = shlex.split(str(one.env.get("command", "")))
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    words = [word.removeprefix("bench.") for word in words if word != "epd-bench"]
    count = 2 if words[:1] == ["transfer"] else 1
    return " ".join(words[:count])


def _flags(a: Result, b: Result) -> Iterator[tuple[str, str]]:
    """(flag, what differs). Results that do not have their flags are held by their commands."""
    first, second = a.env.get("asked"), b.env.get("asked")
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        for _, one, other in _differing(a.env, b.env, ("command",)):
            yield "layouts", f"different commands: {one!r} and {other!r}"
        return
    for name, one, other in _differing(first, second, sorted({*first, *second} - _WHERE)):
        yield name, f"--{name.replace('_', '-')}: A has {one}, B has {other}"
