"""`python -m tests.soak.real_time`: the virtual clock of the emulation against real time, on one layout.

Simulated stages under the real launcher and proxy, loaded by the real sender, take the times of a device's profile in
real time; the emulation takes them in virtual time. What is between the two is what an emulation leaves out (HTTP, the
proxy, processes that wait for a core) or gets wrong. What simulated stages do not take is left out of both: the front,
the handover, stages that slow each other down. On few or busy cores it is the machine that is measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import to_builtins

from bench.clients.bodies import spec_requests
from bench.clients.measure import Measured, Plan, Rules, judged, measure
from bench.clients.target import Target
from bench.micro.measurement import Goal
from bench.served import simulated
from bench.workloads.images import Images
from bench.workloads.requests import Poisson
from deploy.host import event_loop
from epd_serve.errors import StageError
from epd_serve.layout_parser import parse
from tests.soak.emulation.deployment import emulate
from tests.soak.emulation.openpangu_vl_7b_910b import DEVICE
from tests.soak.harness import Result, Soak
from tests.soak.table5 import Load

LAYOUT = "E-P-D"
RATE_RPS = 4.0
COUNT, QUICK_COUNT = 240, 60
FIGURES = tuple(itertools.product(("ttft_ms", "tpot_ms", "e2e_ms"), ("mean", "p50", "p90")))
SIMULATED = replace(DEVICE, front_s=0.0, handover_s=0.0, handover_s_per_token=0.0)
"""What of the device simulated stages take time for."""


def compare(arguments: argparse.Namespace) -> Result:
    count = QUICK_COUNT if arguments.quick else COUNT
    layout, specs = parse(LAYOUT), Load(count).at(RATE_RPS, seed=0)
    plan = Plan(Poisson(RATE_RPS), count=count, devices=layout.device_count, rules=Rules(late_ms=1000.0))
    virtual = judged(emulate(layout, SIMULATED, specs, "virtual"), plan)
    with simulated(LAYOUT, to_builtins(SIMULATED.stage())) as launch:
        requests = spec_requests(specs, launch.model, Images().data_url)
        dues = [spec.arrival_s or 0.0 for spec in specs]
        real = event_loop.run(measure(Target(launch.url), requests, plan, label="real", dues=dues))
    for one in (virtual, real):
        if not one.valid:
            raise StageError(f"the run is not valid: {[objection.text for objection in one.objections]}", stage=LAYOUT)
    return compared(real, virtual), [{"clock": "real", **real.row()}, {"clock": "virtual", **virtual.row()}], ""


def compared(real: Measured, virtual: Measured) -> Mapping[str, float]:
    """Returns figures of both, and the real ones as multiples of the virtual ones."""
    figures: dict[str, Any] = {}
    for kind, which in FIGURES:
        both = real.figures[kind][which], virtual.figures[kind][which]
        figures |= {f"real_time/{kind}/{which}": both[0], f"virtual/{kind}/{which}": both[1]}
        figures[f"real_over_virtual/{kind}/{which}"] = round(both[0] / both[1], 4)
    return figures


SOAK = Soak(
    "real_time",
    "the emulation's virtual clock against simulated stages in real time",
    compare,
    (
        Goal("real_over_virtual/tpot_ms/p50", ">=", 0.95, "no stage is quicker than its profile"),
        Goal("real_over_virtual/e2e_ms/mean", ">=", 0.95),
    ),
    (
        Goal("real_over_virtual/tpot_ms/p50", "<=", 1.05, "on cores with nothing else to do"),
        Goal("real_over_virtual/e2e_ms/mean", "<=", 1.1),
    ),
)

if __name__ == "__main__":
    raise SystemExit(SOAK.main())
