"""How long our own modules take to import in the processes of a stage, on top of what vLLM has imported by then."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from bench.record import ROOT
from epd_serve.errors import EpdError

# What vLLM itself has loaded when it comes to our module. `vllm` stands in a string: it is imported over there only.
_ENGINE = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.distributed.ec_transfer.ec_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.factory",
)
PARTS = {
    "stage_main, before vLLM": ((), ("epd_serve.engine.argv", "epd_serve.lifeline")),
    "plugin, in every process": (("vllm.plugins", "multiprocessing"), ("epd_serve.engine.plugin",)),
    "feature connector, in the engine": (_ENGINE, ("epd_serve.engine.ec.connector",)),
    "KV connector, in the engine": (
        (*_ENGINE, "epd_serve.engine.ec.connector"),
        ("epd_serve.engine.kv.connector",),
    ),
}
TIMEOUT_S = 300.0


def import_seconds(rounds: int = 3) -> dict[str, float]:
    """Median seconds per part of `PARTS`, each round in a fresh Python.

    Raises:
        EpdError: an import failed; with Python's last words.
    """
    return {part: statistics.median(_import(*modules) for _ in range(rounds)) for part, modules in PARTS.items()}


def _import(before: tuple[str, ...], ours: tuple[str, ...]) -> float:
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
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise EpdError(f"importing {', '.join(ours)} failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1]))
