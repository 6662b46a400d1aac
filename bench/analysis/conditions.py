"""Whether two results may be compared: what forbids it, and what has to be known beside it. Pure.

Forbidden is what makes a ratio meaningless: another kind (real, emulated, simulated), another measurement, other
requests, other objectives. Another machine or commit may be the very thing that is compared, so it is only told.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from bench.analysis.results import ASKED, Result
from bench.record import busy, flatten

_WHERE = frozenset("json rows out plot cache traces resume url header report output".split())
"""Flags that say where things are."""
_MORE = frozenset(
    "quick n requests rounds round repeats duration seconds warmup pause layouts only without modes real layout "
    "entries".split()
)
"""Flags that say how much is measured, or which parts: figures that both have can still be compared."""
_JUDGING = frozenset("devices kind min_samples late_ms".split())
"""Fields of a load's experiment that say what serves, and what a valid run is."""
_TOLD = ("machine/cpu", "machine/cores", "machine/arch", "commit", "versions/")


def refusals(a: Result, b: Result) -> list[str]:
    """Why they cannot be compared, each with the field at fault; empty where they can."""
    found = list(_differing({"kind": a.kind}, {"kind": b.kind}))
    left, right = (one.env.get("load") for one in (a, b))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        first, second = _asked(left), _asked(right)
        both = first.keys() & second.keys()
        return found + list(_differing(*({name: one[name] for name in one if name in both} for one in (first, second))))
    found += _differing({"measurement": _measurement(a)}, {"measurement": _measurement(b)})
    return found or list(_flags(a, b, more=False))


def warnings(a: Result, b: Result) -> list[str]:
    """What a reader of the ratios has to know."""
    return list(dict.fromkeys([*_between(a, b), *_within("A", a), *_within("B", b)]))


def _between(a: Result, b: Result) -> Iterator[str]:
    first, second = (
        {name: value for name, value in flatten(one.env).items() if name.startswith(_TOLD)} for one in (a, b)
    )
    yield from _differing(first, second)
    yield from _differing({"devices": a.devices}, {"devices": b.devices})
    if not ("load" in a.env and "load" in b.env):
        yield from _flags(a, b, more=True)


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


def _asked(load: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a load was asked to send, and to be judged by."""
    asked = load.get("experiment") or {name: load[name] for name in (*ASKED, "model") if name in load}
    return {name: value for name, value in asked.items() if name not in _JUDGING}


def _measurement(one: Result) -> str:
    """`ttft`, or `transfer pd`: the words of the command before its flags."""
    words = shlex.split(str(one.env.get("command", "")).replace("python -m", "epd-bench"))[1:]
    return " ".join(words[: 2 if words[:1] == ["transfer"] else 1])


def _flags(a: Result, b: Result, *, more: bool) -> Iterator[str]:
    """What differs of the flags that say how much is measured (`more`), or of the others.

    Results that do not have their flags are held by their commands, which refuse nothing.
    """
    sides = [one.env.get("asked") or {} for one in (a, b)]
    if not all(sides):
        return _differing(*({"command": one.env.get("command")} if more else {} for one in (a, b)))
    wanted = [name for name in {**sides[0], **sides[1]} if name not in _WHERE and (name in _MORE) == more]
    return _differing(*({f"--{name.replace('_', '-')}": side.get(name) for name in wanted} for side in sides))


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Of each field that differs its name and both values."""
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            yield f"{name}: A has {a.get(name)}, B has {b.get(name)}"
