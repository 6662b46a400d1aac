"""`python -m bench.papers.emulation.real_time`: the virtual clock against real time, on one layout, with one profile.

Simulated stages under the real launcher and proxy, loaded by the real generator, take the times of the profile in real
time; the emulation takes them in virtual time. What is between the two is what an emulation leaves out (HTTP, the
proxy, processes that wait for a core) or gets wrong. What simulated stages do not take is left out of both: the front,
the handover, stages that slow each other down. On few or busy cores it is the machine that is measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.client.measure import Plan, judged
from bench.papers.devices.stage import StageDevice
from bench.papers.emulation.check import DEVICES
from bench.papers.emulation.deployment import emulate
from bench.papers.emulation.table5 import WORKLOAD, Load
from bench.record import ROOT, add_arguments, busy, environment, write
from bench.served import served
from bench.workloads.arrivals import Poisson
from deploy.placement_table import table
from epd_serve.errors import EpdError, StageError
from epd_serve.layout_parser import parse

LAYOUT = "E-P-D"
RATE_RPS = 4.0
COUNT, QUICK_COUNT = 240, 60
FIGURES = tuple((kind, which) for kind in ("ttft_ms", "tpot_ms", "e2e_ms") for which in ("mean", "p50", "p90"))
LOAD_S = 600.0


def as_simulated(device: StageDevice) -> StageDevice:
    """What of a device simulated stages take time for."""
    return replace(
        device, front_s=0.0, handover_s=0.0, handover_s_per_token=0.0, transfer_s=0.0, transfer_s_per_token=0.0
    )


def compared(real: Mapping[str, Any], virtual: Mapping[str, Any]) -> dict[str, float]:
    """Figures of both, and the real ones as multiples of the virtual ones."""
    found: dict[str, float] = {}
    for kind, which in FIGURES:
        both = real[kind][which], virtual[kind][which]
        found |= {f"real_time/{kind}/{which}": both[0], f"virtual/{kind}/{which}": both[1]}
        found[f"real_over_virtual/{kind}/{which}"] = round(both[0] / both[1], 4)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m bench.papers.emulation.real_time", description=__doc__)
    parser.add_argument("--emulate", default="910b", choices=tuple(DEVICES), help="device (default 910b)")
    parser.add_argument("--layout", default=LAYOUT, help=f"without stages that share a device (default {LAYOUT})")
    parser.add_argument("--rate", type=float, default=RATE_RPS, help=f"requests a second (default {RATE_RPS:g})")
    parser.add_argument("--seed", type=int, default=0)
    add_arguments(parser, quick=f"{QUICK_COUNT} requests instead of {COUNT}")
    arguments = parser.parse_args(words)
    env = environment(words, "simulated stages in real time against the virtual clock")
    env["command"] = shlex.join(["python", "-m", "bench.papers.emulation.real_time", *words])
    if warning := busy(env):
        print(warning, file=sys.stderr)
    device = as_simulated(DEVICES[arguments.emulate][0])
    count = QUICK_COUNT if arguments.quick else COUNT
    try:
        virtual, real = _virtual(device, arguments, count), _real(device, arguments, count)
    except EpdError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    figures = compared(real, virtual)
    rows: list[tuple[str, ...]] = [("", "real time", "virtual", "ratio")]
    for kind, which in FIGURES:
        name = f"{kind}/{which}"
        values = (figures[f"{kind_of}/{name}"] for kind_of in ("real_time", "virtual", "real_over_virtual"))
        rows.append((name, *(f"{value:.4g}" for value in values)))
    print(f"{arguments.layout}, {arguments.rate:g} req/s, {count} requests, simulated stages:\n{table(rows)}")
    write(arguments.json, figures, env, [{"clock": "real", **real}, {"clock": "virtual", **virtual}])
    return 0


def _virtual(device: StageDevice, arguments: argparse.Namespace, count: int) -> dict[str, Any]:
    requests = Load(count).at(arguments.rate, arguments.seed)
    layout = parse(arguments.layout)
    run = emulate(layout, device, requests, f"{arguments.rate:g} rps").run
    return judged(run, Plan(Poisson(arguments.rate), count=count, devices=layout.device_count)).row()


def _real(device: StageDevice, arguments: argparse.Namespace, count: int) -> dict[str, Any]:
    """The run's row as `epd-bench load` writes it. Raises StageError where it has none."""
    with tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/tmp") as scratch:
        profile, result = Path(scratch) / "profile.json", Path(scratch) / "result.json"
        profile.write_text(json.dumps(asdict(device.profile())), encoding="utf-8")
        with served(arguments.layout, ["--engine", "sim", "--sim-profile", str(profile)], traced=False) as launch:
            argv = [sys.executable, "-m", "bench.cli", "load", launch.url, "--workload", WORKLOAD, "--n", str(count)]
            argv += ["--rate", str(arguments.rate), "--seed", str(arguments.seed), "--late-ms", "1000"]
            argv += ["--json", str(result)]
            try:
                done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LOAD_S)
            except subprocess.TimeoutExpired:
                raise StageError(f"the load took longer than {LOAD_S:g} s", stage=arguments.layout) from None
        if not result.is_file():
            raise StageError(f"the load left no result: {done.stderr[-1000:]}", stage=arguments.layout)
        row: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))["rows"][0]
        if not row["valid"]:
            raise StageError(f"the load is not valid: {row['objections']}", stage=arguments.layout)
        return row


if __name__ == "__main__":
    sys.exit(main())
