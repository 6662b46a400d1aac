"""Encodes of an image that many clients send at once, behind two proxies. A part of `epd-bench transfer ep`.

2E-P-D with the launcher's proxy, and a second `epd-serve proxy` in front of the same stages that hears what it hears.
Every round has an image of its own, sent by all clients at the same moment, half of them to each proxy, and once more
to each proxy when its feature is known. Encodes are what the encoders report to the proxy; a feature that P encodes
again because it got lost counts as one too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from bench.clients.sender import Flow, ask, send
from bench.clients.target import Target, requests
from bench.micro.measurement import Goal, Row
from bench.served import Served, answers, scratch, served
from bench.workloads.synthetic import demo_body, demo_image
from deploy.host.ports import free_ports
from deploy.host.started import started
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from deploy.plan.proxy_settings import build_proxy_settings
from epd_serve.endpoint import unix_url
from epd_serve.errors import StageError

LAYOUT = "2E-P-D"
SIZE = 224
START_S = 30.0
REPORT_S = 0.7  # stages report at least every 0.5 s
_ENCODED = re.compile(r'epd_store_events_total\{(.*event="(?:encoded|recomputed\.\w+)".*)\} (\S+)')
_INSTANCE = re.compile(r'instance="(\w+)"')
GOALS = (Goal("encodes_for_64_duplicates", "==", 1), Goal("encodes_for_a_known_feature", "==", 0))
CLIENTS = 64


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row of each image."""
    with served(LAYOUT, traced=False) as launch, second_proxy(launch) as other:
        urls = (launch.url, other)
        for number, url in enumerate(urls):  # connections, kernels, first-time imports
            ask(url, demo_body(launch.model, demo_image(900 + number, SIZE)))
        for number in range(arguments.rounds):
            yield _round(launch, urls, CLIENTS, number)


def _round(launch: Served, urls: Sequence[str], clients: int, number: int) -> Row:
    """Raises StageError when a request is not answered whole."""
    body = demo_body(launch.model, demo_image(number, SIZE))
    before = _encodes_so_far(launch.url)
    run = send(Target(urls), Flow(requests([body]), dues=[0.0] * clients))
    if bad := [one for one in run.rows if not one.ok]:
        raise StageError(f"{len(bad)} of {clients} duplicates failed: {bad[0].fault}: {bad[0].error}", stage="proxy")
    after = _encodes_so_far(launch.url)
    for url in urls:
        ask(url, body)
    by = after - before
    return {
        "image": number,
        "clients": clients,
        "encodes": by.total(),
        "by": ",".join(by),
        "encodes_when_known": (_encodes_so_far(launch.url) - after).total(),
        "slowest_ms": round(max(one.e2e_s for one in run.rows) * 1e3, 1),
    }


def _encodes_so_far(url: str) -> Counter[str]:
    """When all has been reported: what follows begins with encoders that have nothing to do, as both proxies know.

    Raises:
        StageError: somebody goes on encoding.
    """
    found, end = None, time.monotonic() + START_S
    while time.monotonic() < end:
        before, found = found, encodes(httpx.get(f"{url}/metrics", trust_env=False).text)
        if found == before:
            return found
        time.sleep(REPORT_S)
    raise StageError(f"encoders go on for {START_S:g} s without a request", stage="E")


def encodes(metrics: str) -> Counter[str]:
    """Features that each instance encoded, or recomputed, so far: from the proxy's metrics."""
    found: Counter[str] = Counter()
    for labels, value in _ENCODED.findall(metrics):
        found[_INSTANCE.search(labels)[1]] += round(float(value))  # type: ignore[index]  # every series has one
    return found


@contextlib.contextmanager
def second_proxy(launch: Served) -> Iterator[str]:
    """`epd-serve proxy` in front of the launch's stages, keyed as its own proxy is. Yields the URL.

    Raises:
        StageError: it did not become healthy.
    """
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with scratch() as folder:
        file = folder / "stages.json"
        file.write_text(json.dumps(stages_file(launch)), encoding="utf-8")
        argv = [sys.executable, "-m", "deploy.cli", "proxy", "--stages", str(file), "--port", str(port)]
        with started(argv, folder / "proxy.log") as proxy:
            proxy.ready(lambda: answers(f"{url}/ready?all"), START_S)
            yield url


def stages_file(launch: Served) -> dict[str, Any]:
    """What `epd-serve proxy --stages` needs to know of a launch."""
    identity = build_proxy_settings(draw(DeployConfig(layout=LAYOUT, device="cpu"))).identity
    instances = httpx.get(f"{launch.url}/instances", trust_env=False).json()["instances"]
    known = {one["id"]: {name: one[name] for name in ("incarnation", "devices", "cpu_cores")} for one in instances}
    stages = [
        {
            "id": stage.instance,
            "role": stage.role,
            "url": unix_url(launch.run / stage.server),
            **known[stage.instance],
            "events": f"ipc://{launch.run}/{stage.instance}.events",
            "load_news": f"ipc://{launch.run}/{stage.instance}.load",
            **({"kv_endpoint": f"ipc://{launch.run}/{stage.instance}.kv"} if stage.role == "P" else {}),
        }
        for stage in launch.stages
    ]
    return {"model": launch.model, "revision": identity.revision, "dtype": identity.dtype, "stages": stages}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Of the worst round."""
    return {
        f"encodes_for_{rows[0]['clients']}_duplicates": max(row["encodes"] for row in rows),
        "encodes_for_a_known_feature": max(row["encodes_when_known"] for row in rows),
    }
