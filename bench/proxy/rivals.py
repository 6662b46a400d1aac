"""Other proxies run beside ours, and what each gets done: the same loops through all of them, in turns.

Ratios are taken within a round, so that what slows the machine down slows both sides.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.clients.metrics import throughput
from bench.clients.process import SenderProcess
from bench.clients.sender import Flow
from bench.clients.target import Request
from bench.micro.measurement import Row, in_turns
from bench.micro.rows import grouped, ratios
from bench.served import Served
from bench.workloads.synthetic import image_body, text_body
from deploy.agent.cpu_time import cpu_seconds
from deploy.host.ports import free_ports
from deploy.host.started import started

CONCURRENCY = 32
ANSWER_TOKENS, PROMPT_TOKENS = 16, 19
IMAGE_SIDE = 258  # x side x 3 bytes of noise that no PNG compresses: 200 KB
WARM_UP_S = 0.5

START_S = 60.0


class Rival(NamedTuple):
    """Something that answers requests. `pids`: its processes, none where their CPU time is not asked for."""

    name: str
    url: str
    pids: tuple[int, ...] = ()


@contextlib.contextmanager
def running(name: str, port: int, argv: Sequence[str]) -> Iterator[Rival]:
    """Run `argv` until the context ends; its output goes to a file that is shown when it does not start.

    Raises:
        StageError: it ended, or did not listen on `port` within `START_S`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="epd-bench-") as folder,
        started(argv, Path(folder) / "log", name=name) as process,
    ):
        process.ready(lambda: _listens(port), START_S)
        yield Rival(name, f"http://127.0.0.1:{port}", (process.process.pid,))


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def text_request(model: str, *, stream: bool) -> Request:
    return Request.of(text_body(model, tokens=PROMPT_TOKENS, answer=ANSWER_TOKENS, stream=stream))


def image_request(model: str, seed: int, side: int = IMAGE_SIDE) -> Request:
    """Returns a streamed request with an image of noise that no other seed gives, about side² · 3 bytes."""
    return Request.of(image_body(model, side=side, answer=ANSWER_TOKENS, stream=True, seed=seed, noise=True))


def stage_of(launch: Served, role: str = "PD") -> str:
    """Returns the URL of the stage itself, past the proxy."""
    url = launch.stage_url(role)
    assert url is not None, f"the layout has a {role}"
    return url


@contextlib.contextmanager
def bare_relay(*stages: str) -> Iterator[Rival]:
    """`relay.py` in front of stages (URLs)."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "bench.proxy.relay", str(port), *stages]
    with running("relay", port, argv) as rival:
        yield rival


@contextlib.contextmanager
def two_call_relay(launch: Served) -> Iterator[Rival]:
    """`two_calls.py` in front of P and D of a launch of P-D on this machine."""
    (port,) = free_ports(1)
    shown = httpx.get(f"{launch.url}/instances").raise_for_status().json()["instances"]
    incarnations = {one["id"]: one["incarnation"] for one in shown}
    peers = json.loads((launch.run / "peers.json").read_text(encoding="utf-8"))
    ((instance, endpoint),) = ((one["instance"], one["kv_endpoint"]) for one in peers if one["kv_endpoint"])
    peer = {"instance": instance, "incarnation": incarnations[instance], "endpoint": endpoint}
    urls = stage_of(launch, "P"), stage_of(launch, "D")
    argv = [sys.executable, "-m", "bench.proxy.two_calls", str(port), *urls, json.dumps(peer)]
    with running("two-call relay", port, argv) as rival:
        yield rival


def closed_loop(sender: SenderProcess, rival: Rival, requests: Sequence[Request], seconds: float) -> Row:
    """Returns what a closed loop through `rival` saw, and its CPU time per request."""
    before = cpu_seconds({"it": rival.pids})["it"]
    flow = Flow(requests, concurrency=CONCURRENCY, duration_s=WARM_UP_S + seconds)
    run = sender.run(rival.url, flow)
    spent_s = cpu_seconds({"it": rival.pids})["it"] - before
    row = throughput(run, warm_up_s=WARM_UP_S, seconds=seconds)
    return row | ({"cpu_us_per_request": round(spent_s / len(run.rows) * 1e6, 1)} if rival.pids else {})


def compared(rivals: Sequence[Rival], kinds: Mapping[str, Callable[[Rival], Row]], rounds: int) -> Iterator[Row]:
    """Yields `kind`, `to`, `round` and what the kind's measurement of a rival returns, of all of both in turns."""
    for turn, (kind, rival) in in_turns([*product(kinds, rivals)], rounds):
        yield {"kind": kind, "to": rival.name, "round": turn, **kinds[kind](rival)}


def ratio(rows: Sequence[Row], kind: str, name: str, base: str, field: str = "rps") -> float:
    """Returns the median over rounds of `name`'s value over `base`'s."""
    by = grouped(rows, "kind", "to")
    over = ratios(by[kind, name], by[kind, base], field)
    assert over is not None, "both are in every round"
    return round(over.median, 4)
