"""An experiment: deployments, rates, requests, and the limits of a run; and whether two experiments are one. Pure.

What is compared is layouts and baselines, each with its name, its devices and its folder. An experiment is the one
record of what was asked: the sweep measures by it, `experiment.json` keeps it, the analysis reads it back. A resumed
sweep has to ask what the first one asked, or its deployments could not be compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from bench.clients.measure import Plan, Rules
from bench.clients.sender import Bounds
from bench.clients.slo import PAPER
from bench.clients.sweep import label_of
from bench.record import read_json
from bench.workloads.requests import Poisson
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.placement import check_servable
from epd_serve.slo import MEAN, Slo

_UNSAFE = re.compile(r"[^A-Za-z0-9.+-]")


LATE_MS = 100.0
"""More than `epd-bench load` allows: here the generator always shares the host of the stages."""


class ServedBy(StrEnum):
    """What serves a deployment: `epd-serve serve`, or plain vLLM servers."""

    LAYOUT = "layout"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One line of the comparison.

    Attributes:
        name: in every table and figure.
        layout: in its canonical form; plain vLLM is the layout that it amounts to.
        devices: how many it occupies.
        flags: of `epd-serve serve`, or of each plain vLLM.
    """

    name: str
    layout: str
    devices: Annotated[int, msgspec.Meta(ge=1)]
    served_by: ServedBy = ServedBy.LAYOUT
    flags: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """The name of its folder: its own, with _ for what a file name should not have."""
        return _UNSAFE.sub("_", self.name)

    @property
    def baseline(self) -> bool:
        return self.served_by is not ServedBy.LAYOUT

    @property
    def label(self) -> str:
        """Name and device count, as every legend has it."""
        return f"{self.name}, {self.devices} {'device' if self.devices == 1 else 'devices'}"


def deployments(
    layouts: str,
    *,
    flags: Sequence[str] = (),
    vllm: bool = False,
    vllm_flags: Sequence[str] = (),
) -> tuple[Deployment, ...]:
    """The deployments in the order in which they are measured: layouts, then baselines.

    Args:
        layouts: with commas between. flags: of each.
        vllm: plain vLLM too, at every number of devices that a layout has: one server per device.

    Raises:
        LayoutError: a layout that does not parse, or cannot serve; with a caret under the fault.
        ConfigError: no layout, one of them twice.
    """
    names = [name.strip() for name in layouts.split(",") if name.strip()]
    if not names:
        raise ConfigError("--layouts names no layout", param="--layouts")
    parsed = {name: _servable(name) for name in names}
    if len({str(layout) for layout in parsed.values()}) < len(names):
        raise ConfigError(f"--layouts names a layout twice: {layouts}", param="--layouts")
    made = [Deployment(name, str(layout), layout.device_count, flags=tuple(flags)) for name, layout in parsed.items()]
    for count in sorted({one.devices for one in made}) if vllm else ():
        name = "plain vLLM" if count == 1 else f"plain vLLM x{count}"
        made.append(Deployment(name, str(parse(f"TP1x{count}")), count, ServedBy.VLLM, tuple(vllm_flags)))
    return tuple(made)


def _servable(name: str) -> Layout:
    layout = parse(name)
    check_servable(layout)
    return layout


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run to be made.

    Attributes:
        number: among the deployment's runs; every deployment's run of a number has the same requests, if not at the
            same times.
        rate: as it was asked for. rate_rps: of all devices together.
        label: of the run, in rows and figures.
    """

    number: int
    rate: float
    rate_rps: float
    label: str


@dataclass(frozen=True)
class Experiment:
    """What is asked.

    Attributes:
        kind: `real`, `simulated` or `emulated …`.
        rates: requests a second, as given; of each device where `per_device`, else of all together.
        duration_s, count: what ends a run, whichever comes first. warm_up_s: of it, not counted; None: a tenth.
        rules, bounds: what makes a run valid, and keeps it finite, as `epd-bench load` has it.
        knobs: of the workload. served: what serves: engine, device, model.
        machine, versions: on which all of it was measured.
    """

    kind: str
    workload: str
    rates: tuple[float, ...]
    deployments: tuple[Deployment, ...]
    per_device: bool = False
    duration_s: float | None = None
    count: int | None = None
    seed: int = 0
    slos: tuple[Slo, ...] = PAPER
    warm_up_s: float | None = None
    rules: Rules = field(default_factory=lambda: Rules(late_ms=LATE_MS))
    bounds: Bounds = field(default_factory=lambda: Bounds(limit_s=120.0))
    knobs: Mapping[str, Any] = field(default_factory=dict)
    served: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def real(self) -> bool:
        return self.kind.startswith("real")

    @property
    def rate_axis(self) -> str:
        """What rates are called on axes and in tables."""
        return f"request rate (req/s{' per device' if self.per_device else ''})"

    def runs(self, deployment: Deployment) -> list[PlannedRun]:
        """The runs of a deployment, in order."""
        totals = [rate * (deployment.devices if self.per_device else 1) for rate in self.rates]
        return [
            PlannedRun(number, rate, total, label_of(Poisson(total)))
            for number, (rate, total) in enumerate(zip(self.rates, totals, strict=True))
        ]

    def plan(self, deployment: Deployment, run: PlannedRun) -> Plan:
        """How a run is sent and judged. Its seed follows from its number, so all deployments get the same requests."""
        return Plan(
            Poisson(run.rate_rps),
            count=self.count,
            seconds=self.duration_s,
            seed=self.seed + run.number,
            warm_up_s=self.warm_up_s,
            slos=self.slos,
            devices=deployment.devices,
            rules=self.rules,
            bounds=self.bounds,
        )

    def to_json(self) -> dict[str, Any]:
        """`experiment.json`, as reading the file gives it back."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain


def read_asked(path: Path) -> dict[str, Any]:
    """`experiment.json`, plain. Objectives from before they named their judge are judged by the mean, as they were.

    Raises:
        ConfigError: it cannot be read; names the file and the fault.
    """
    plain = read_json(path, dict[str, Any])
    return plain | {"slos": [{"judge": MEAN, **slo} for slo in plain["slos"]]} if "slos" in plain else plain


def read_experiment(path: Path) -> Experiment:
    """The same as it was asked. Raises as `read_asked`."""
    try:
        return msgspec.convert(read_asked(path), Experiment)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
