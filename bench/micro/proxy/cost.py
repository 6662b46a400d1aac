"""What the CPU time of an answer in one piece goes to in our proxy, beside the bare relay's, which is not divided.

A closed loop over stages that take no time, as in `speed`, with the front door's stacks sampled (`sampler.py`): a
sample belongs to the innermost of its modules that `STEPS` names. What the start took is left out by its imports.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.clients.process import SenderProcess
from bench.micro.measurement import Row
from bench.micro.proxy.rivals import bare_relay, closed_loop, compared, stage_of, text_request
from bench.micro.rows import grouped, median
from bench.served import scratch, simulated
from bench.started import Rival

PROGRAM = "deploy.front.process"
STEPS = {
    "HTTP with the client": ("uvicorn", "proxy.server", "proxy.http.body"),
    "HTTP with the stage": ("proxy.stages.connection", "proxy.stages.client"),
    "body parsed, checked, written again; answer checked": (
        *("proxy.fields", "proxy.request.parse", "proxy.request.payload", "proxy.strict_json"),
        *("proxy.stages.bodies", "proxy.stages.cost", "proxy.stages.prompt_nodes"),
    ),
    "choice of an instance, its ledger": (
        *("proxy.generate.router", "proxy.routing", "proxy.registry"),
        *("proxy.workers.shared_ledger", "proxy.workers.shared_counters"),
    ),
    "admission, keys, limits": (
        *("proxy.admission", "proxy.tenants", "proxy.request.body_memory"),
        *("proxy.stages.retry_budget", "proxy.stages.suspects"),
    ),
    "records, metrics, traces": ("proxy.records", "proxy.metrics", "prometheus_client", "epd_serve.trace"),
    "attempts, deadlines, cancelling": ("proxy", "starlette", "fastapi"),
}
"""Modules of each, with all in them; the longest name counts."""
REST = "event loop"
_STEP_OF = {module: step for step, modules in STEPS.items() for module in modules}


def measure(sender: SenderProcess, quick: bool) -> Iterator[Row]:
    """Rows of the relay and the proxy, then one per step."""
    seconds, rounds = (3.0, 3) if quick else (10.0, 5)
    with scratch() as folder:
        with simulated("PD", env=sampling(PROGRAM, folder)) as fused, bare_relay(stage_of(fused)) as relay:
            request = text_request(fused.model, stream=False)
            rivals = relay, Rival("proxy", fused.url, fused.cpu_parts["proxy"])
            kinds = {"whole": lambda rival: closed_loop(sender, rival, [request], seconds)}
            rows = list(compared(rivals, kinds, rounds))
        counted = [json.loads(one.read_text(encoding="utf-8")) for one in folder.glob("*.json")]
    yield from rows
    yield from steps(counted, median([row for row in rows if row["to"] == "proxy"], "cpu_us_per_request"))


def sampling(program: str, folder: Path) -> dict[str, str]:
    """Environment in which Python samples processes of the module `program`; what they counted comes to `folder`."""
    start = f"from bench.micro.proxy import sampler\nsampler.begin({program!r}, {str(folder)!r})\n"
    (folder / "sitecustomize.py").write_text(start, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def steps(counted: Sequence[Mapping[str, int]], us_per_request: float) -> Iterator[Row]:
    """A row per step: its samples, and its share of `us_per_request`."""
    samples: Counter[str] = Counter()
    for stack, count in ((stack.split(), count) for one in counted for stack, count in one.items()):
        if not any(module.startswith("importlib.") for module in stack):
            samples[step_of(stack)] += count
    for step, count in samples.most_common():
        us = round(us_per_request * count / samples.total(), 1)
        print(f"{us:8.1f} us a request: {step}", flush=True)
        yield {"kind": "step", "to": step, "round": 0, "samples": count, "us_per_request": us}


def step_of(stack: Sequence[str]) -> str:
    """`stack`: modules from the outermost."""
    for module in reversed(stack):
        while module:
            if module in _STEP_OF:
                return _STEP_OF[module]
            module = module.rpartition(".")[0]
    return REST


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """CPU time per request."""
    by = grouped([row for row in rows if row["kind"] == "whole"], "to")
    return {f"{name}_us_per_request": median(by[name,], "cpu_us_per_request") for name in ("proxy", "relay")}
