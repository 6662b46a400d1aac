"""`epd-bench duplicates`: encodes of a picture that many clients send at once, on real stages behind two proxies.

2E-P-D with the launcher's proxy, and a second `epd-serve proxy` in front of the same stages. Every round has a picture
of its own, sent by all clients at the same moment, half of them to each proxy. Encodes are counted from the encoders'
phase stamps; a feature that P encodes again because it got lost counts as one too (P's reports). The same with proxies
alone, without stages, is in `epd-bench transfer ep`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench.chat import ask, body, picture
from bench.goals import Goal, goal_table
from bench.record import ROOT, environment, write
from bench.record import add_arguments as add_record_arguments
from bench.served import Served, served
from bench.stamps import read_stamps
from deploy.blueprint import draw
from deploy.config import DeployConfig
from deploy.placement_table import table
from deploy.ports import free_ports
from deploy.proxy_settings import build_proxy_settings
from epd_serve.errors import StageError

LAYOUT = "2E-P-D"
SIZE = 224
START_S = 30.0
REPORT_S = 0.7  # stages report at least every 0.5 s
STOP_S = 10.0
_RECOMPUTED = re.compile(r'epd_store_events_total\{.*event="recomputed\.')
GOALS = (Goal("encodes_for_64_duplicates", "==", 1),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=64, help="duplicates per round")
    parser.add_argument("--rounds", type=int, help="pictures (default 10, quick 3)")
    add_record_arguments(parser, quick="3 pictures")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print the table, write the result. The figure is the worst round's."""
    env = environment(argv, asked=arguments)
    with served(LAYOUT) as launch, second_proxy(launch) as other:
        with httpx.Client(timeout=120, trust_env=False) as client:
            for seed, url in enumerate((launch.url, other)):
                ask(client, url, body(launch.model, picture(900 + seed, SIZE)))
        rounds = arguments.rounds or (3 if arguments.quick else 10)
        rows = [_round(launch, other, arguments.clients, seed) for seed in range(rounds)]
    figures: dict[str, float] = {f"encodes_for_{arguments.clients}_duplicates": max(row["encodes"] for row in rows)}
    lines = [("picture", "encodes", "by", "slowest answer ms")]
    lines += [(str(row["picture"]), str(row["encodes"]), row["by"], f"{row['slowest_ms']:.0f}") for row in rows]
    print(
        f"{table(lines)}\n\n{goal_table(figures, GOALS)}\n\nReal: {LAYOUT}, two proxies, {arguments.clients} clients."
    )
    write(arguments.json, figures, env, rows)
    return 0


def _round(launch: Served, other: str, clients: int, seed: int) -> dict[str, Any]:
    request = body(launch.model, picture(seed, SIZE))
    recomputed = _recomputed(launch.url)
    begun = time.monotonic()

    def send(number: int) -> float:
        with httpx.Client(timeout=120, trust_env=False) as client:
            return ask(client, (launch.url, other)[number % 2], request).ended

    with ThreadPoolExecutor(clients) as pool:
        ended = max(pool.map(send, range(clients)))
    time.sleep(REPORT_S)
    by = encoders(launch.traces, begun) + ["P"] * round(_recomputed(launch.url) - recomputed)
    return {"picture": seed, "encodes": len(by), "by": ",".join(by), "slowest_ms": round((ended - begun) * 1e3, 1)}


def _recomputed(url: str) -> float:
    return recomputes(httpx.get(f"{url}/metrics", trust_env=False).text)


def recomputes(metrics: str) -> float:
    """Features that any instance recomputed so far, in the proxy's metrics."""
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if _RECOMPUTED.match(line))


def encoders(traces: Path, since: float) -> list[str]:
    """The encoder of every encode since then."""
    return [stamp.instance for stamp in read_stamps(traces) if stamp.event == "encoded" and stamp.t >= since]


@contextlib.contextmanager
def second_proxy(launch: Served) -> Iterator[str]:
    """`epd-serve proxy` in front of the launch's stages, keyed as its own proxy is. Yields the URL.

    Raises:
        StageError: it did not become healthy.
    """
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    file = launch.traces.parent / "stages.json"
    file.write_text(json.dumps(stages_file(launch)), encoding="utf-8")
    argv = [sys.executable, "-m", "deploy.cli", "proxy", "--stages", str(file), "--port", str(port)]
    log = launch.traces.parent / "second-proxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _until_healthy(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stages_file(launch: Served) -> dict[str, Any]:
    """What `epd-serve proxy --stages` needs to know of a launch."""
    identity = build_proxy_settings(draw(DeployConfig(layout=LAYOUT, device="cpu"))).identity
    lives = httpx.get(f"{launch.url}/instances", trust_env=False).json()["instances"]
    incarnations = {one["id"]: one["incarnation"] for one in lives}
    stages = [
        {
            "id": stage.instance,
            "role": stage.role,
            "url": f"http://127.0.0.1:{stage.port}",
            "incarnation": incarnations[stage.instance],
            "events": f"ipc://{launch.run}/{stage.instance}.events",
            **({"kv_endpoint": f"ipc://{launch.run}/{stage.instance}.kv"} if stage.role == "P" else {}),
        }
        for stage in launch.stages
    ]
    return {"model": launch.model, "revision": identity.revision, "dtype": identity.dtype, "stages": stages}


def _until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready?all", trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise StageError(
        f"the second proxy did not become healthy:\n{log.read_text(encoding='utf-8')[-2000:]}", stage="proxy"
    )
