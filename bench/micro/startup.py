"""`epd-bench startup`: time to ready per layout against the slowest of its stages started alone, and our imports.

Everything is started `--rounds` times in turns; medians. Every start has the load it met in its row: a figure with
somebody else's work in it shows.

Two cores start several vLLM processes in turns, so a layout of three stages cannot be as fast as one: the ratio says
what that costs here, the imports say what of it is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from bench.micro.alone import seconds_to_ready
from bench.micro.measurement import Measurement, Row, Usually, flag, several, whole
from bench.micro.rows import grouped, median, table_of
from bench.record import ROOT, flatten
from bench.served import served
from deploy.blueprint import draw
from deploy.config import DeployConfig
from epd_serve.errors import EpdError

# What vLLM itself has loaded when it comes to our module. `vllm` stands in a string: it is imported over there only.
_ENGINE = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.distributed.ec_transfer.ec_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.factory",
)
IMPORTS = {
    "stage_main, before vLLM": ((), ("epd_serve.engine.argv", "epd_serve.lifeline")),
    "plugin, in every process": (("vllm.plugins", "multiprocessing"), ("epd_serve.engine.plugin",)),
    "feature connector, in the engine": (_ENGINE, ("epd_serve.engine.ec.connector",)),
    "KV connector, in the engine": (
        (*_ENGINE, "epd_serve.engine.ec.connector"),
        ("epd_serve.engine.kv.connector",),
    ),
}
IMPORT_ROUNDS = 3
IMPORT_S = 300.0


FLAGS = {
    "--layouts": flag(
        "comma-separated",
        Usually(("TP1", "(E-PD)", "E-PD", "EP-D", "(E-P)-D", "E-P-D"), quick=("TP1", "(E-P)-D")),
        several(str),
    ),
    "--rounds": flag("starts of each", Usually(3, quick=1), whole()),
}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of imports, of stages alone, and of layouts with the roles of their stages."""
    blueprints = {layout: draw(DeployConfig(layout=layout, device="cpu")) for layout in arguments.layouts}
    for _ in range(IMPORT_ROUNDS):
        for part, modules in IMPORTS.items():
            yield {"what": part, "kind": "import", "seconds": import_seconds(*modules)}
    alone = {plan.role.value: (blueprint, plan) for blueprint in blueprints.values() for plan in blueprint.plans}
    for _ in range(arguments.rounds):
        for role, (blueprint, plan) in alone.items():
            yield _start(f"{role} alone", "alone", lambda: seconds_to_ready(blueprint, plan), role=role)  # noqa: B023
        for layout, blueprint in blueprints.items():
            stages = [plan.role.value for plan in blueprint.plans]
            yield _start(layout, "layout", lambda: _seconds_to_serve(layout), stages=stages)  # noqa: B023


def _start(what: str, kind: str, seconds: Callable[[], float], **more: object) -> Row:
    row = {"what": what, "kind": kind, "load_average_before": os.getloadavg()[0], **more, "seconds": seconds()}
    print(f"{what}: {row['seconds']:.1f} s (load before: {row['load_average_before']:.1f})", flush=True)
    return row


def _seconds_to_serve(layout: str) -> float:
    with served(layout) as launch:
        return launch.ready_s


def import_seconds(before: tuple[str, ...], ours: tuple[str, ...]) -> float:
    """Seconds that a fresh Python takes to import `ours`, after `before`.

    Raises:
        EpdError: an import failed; with Python's last line.
    """
    script = f"""
import importlib, time, json
for name in {before!r}: importlib.import_module(name)
begun = time.perf_counter()
for name in {ours!r}: importlib.import_module(name)
print(json.dumps(time.perf_counter() - begun))
"""
    path = os.pathsep.join((str(ROOT / "epd_serve/engine/site"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=IMPORT_S,
        check=False,
    )
    if done.returncode != 0:
        raise EpdError(f"importing {', '.join(ours)} failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`alone_s/E`, `layouts/E-PD/ready_s`, `…/ratio` to the slowest of its stages alone, `own_imports_s/…`."""
    seconds = {(kind, what): median(own, "seconds") for (kind, what), own in grouped(rows, "kind", "what").items()}
    layouts = {}
    for layout, stages in {row["what"]: row["stages"] for row in rows if row["kind"] == "layout"}.items():
        ready_s, slowest_s = seconds["layout", layout], max(seconds["alone", f"{stage} alone"] for stage in stages)
        layouts[layout] = {
            "stages": len(stages),
            "ready_s": ready_s,
            "slowest_stage_alone_s": slowest_s,
            "ratio": ready_s / slowest_s,
        }
    alone = {what.removesuffix(" alone"): one for (kind, what), one in seconds.items() if kind == "alone"}
    imports = {what: one for (kind, what), one in seconds.items() if kind == "import"}
    return flatten({"alone_s": alone, "layouts": layouts, "own_imports_s": imports})


def tables(rows: Sequence[Row]) -> Iterable[str]:
    named = figures(rows)
    parts = ("stages", "ready_s", "slowest_stage_alone_s", "ratio")
    layouts = dict.fromkeys(row["what"] for row in rows if row["kind"] == "layout")
    yield table_of(
        [{"layout": layout, **{part: named[f"layouts/{layout}/{part}"] for part in parts}} for layout in layouts],
        {
            "layout": "{layout}",
            "stages": "{stages}",
            "ready s": "{ready_s:.1f}",
            "slowest stage alone s": "{slowest_stage_alone_s:.1f}",
            "ratio": "{ratio:.2f}",
        },
    )
    imports = {part: named[f"own_imports_s/{part}"] for part in IMPORTS}
    yield table_of({**imports, "sum": sum(imports.values())}.items(), {"our own imports": "{0[0]}", "s": "{0[1]:.3f}"})


MEASUREMENT = Measurement(
    quick="one start each of the monolith and of (E-P)-D with its stages",
    flags=FLAGS,
    measure=measure,
    figures=figures,
    tables=tables,
)
add_arguments = MEASUREMENT.add_arguments
