"""What an experiment is: entries, rates, requests, and how they are judged; and whether two experiments are one. Pure.

A resumed run has to ask what the first one asked, or its entries could not be compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.client.slo import PAPER, Slo
from bench.client.sweep import label_of
from bench.layouts.entry import Entry
from bench.workloads.arrivals import Arrivals

PER_DEVICE, TOTAL = "per_device", "total"
UNRECORDED = object()


@dataclass(frozen=True, slots=True)
class Planned:
    """A run to be made.

    Attributes:
        number: among the entry's runs; every entry's run of a number has the same requests, if not at the same times.
        rate: as it was asked for. rate_rps: of all devices together. label: of the run, in rows and figures.
    """

    number: int
    rate: float
    rate_rps: float
    arrivals: Arrivals
    label: str


@dataclass(frozen=True)
class Experiment:
    """What is asked.

    Attributes:
        kind: `real`, `simulated` or `emulated …`.
        rates: requests a second, ascending as given; of each device where `per_device`.
        at: arrivals at a rate; arrivals: their form.
        seconds, count: what ends a run, whichever comes first.
        knobs: of the workload. served: how entries are served: engine, device, model. judged: limits of a run.
        machine, versions: on which all of it was measured.
    """

    kind: str
    workload: str
    rates: tuple[float, ...]
    entries: tuple[Entry, ...]
    at: Callable[[float], Arrivals]
    arrivals: str = "poisson"
    per_device: bool = False
    seconds: float | None = None
    count: int | None = None
    seed: int = 0
    slos: Sequence[Slo] = PAPER
    knobs: Mapping[str, Any] = field(default_factory=dict)
    served: Mapping[str, Any] = field(default_factory=dict)
    judged: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def runs(self, entry: Entry) -> list[Planned]:
        """The runs of an entry, in order."""
        found = []
        for number, rate in enumerate(self.rates):
            total = rate * entry.devices if self.per_device else rate
            arrivals = self.at(total)
            found.append(Planned(number, rate, total, arrivals, label_of(arrivals)))
        return found

    def to_json(self) -> dict[str, Any]:
        """`experiment.json`."""
        return {
            "kind": self.kind,
            "workload": self.workload,
            "knobs": dict(self.knobs),
            "rates": list(self.rates),
            "rates_are": PER_DEVICE if self.per_device else TOTAL,
            "arrivals": self.arrivals,
            "seconds": self.seconds,
            "n": self.count,
            "seed": self.seed,
            "slos": [str(slo) for slo in self.slos],
            "served": dict(self.served),
            "judged": dict(self.judged),
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "entries": [entry.to_json() for entry in self.entries],
        }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first field in which two experiments differ, with both values; "" where they are one."""
    old, new = (json.loads(json.dumps(one)) for one in (before, now))
    for name in dict.fromkeys([*new, *old]):
        was, is_ = old.get(name, UNRECORDED), new.get(name, UNRECORDED)
        if was == is_:
            continue
        if isinstance(was, dict) and isinstance(is_, dict):
            return f"{name}.{difference(was, is_)}"
        if name == "entries" and isinstance(was, list):
            return _entries_differ(was, is_)
        return f"{name} is {_shown(was)} there and {_shown(is_)} here"
    return ""


def _entries_differ(was: Sequence[Mapping[str, Any]], is_: Sequence[Mapping[str, Any]]) -> str:
    names = [[str(entry.get("name")) for entry in one] for one in (was, is_)]
    if names[0] != names[1]:
        return f"entries are {', '.join(names[0])} there and {', '.join(names[1])} here"
    old, new = next(pair for pair in zip(was, is_, strict=True) if pair[0] != pair[1])
    return f"entries.{old['name']}.{difference(old, new)}"


def _shown(value: Any) -> str:
    return "not recorded" if value is UNRECORDED else json.dumps(value)
