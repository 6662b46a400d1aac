"""A deployment that serves, however it was started, and what its instances do now.

Our proxy says that in its status table (`GET /instances`), a plain server in its metrics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.clients.target import Target

ASK_S = 10.0
_REQUESTS = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StageStatus:
    """One instance as it is now.

    Attributes:
        incarnation: names the process; another one, and it was restarted.
        down: why it is not up, else "".
        running, waiting: requests, as its scheduler says.
    """

    instance: str
    role: str
    incarnation: str
    down: str = ""
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class RunningDeployment:
    """Something that serves a deployment.

    Attributes:
        target: whom to load. model: as it is called there.
        ready_s: from its start until it was ready.
        status: what its instances run now; raises OSError where nobody answers.
        traces: folder of its phase stamps, or None.
        shared_cores: its devices are virtual, and there are fewer cores than devices.
    """

    target: Target
    model: str
    ready_s: float
    status: Callable[[], Sequence[StageStatus]]
    traces: Path | None = None
    shared_cores: bool = False


def proxy_status(url: str) -> list[StageStatus]:
    """The instances of our proxy at `url`. Raises OSError where it does not answer."""
    found = []
    for one in _get(f"{url}/instances").json()["instances"]:
        stage = one["stage"] or {}
        down = "" if one["up"] else one["reason"] or "it is down"
        counts = (int(stage.get(name, 0)) for name in ("running", "waiting"))
        found.append(StageStatus(one["id"], one["role"], one["incarnation"], down, *counts))
    return found


def server_status(url: str, instance: str, incarnation: str) -> StageStatus:
    """A plain server at `url`. Raises OSError where it does not answer."""
    counts = {"running": 0.0, "waiting": 0.0}
    for name, value in _REQUESTS.findall(_get(f"{url}/metrics").text):
        counts[name] += float(value)
    return StageStatus(instance, "EPD", incarnation, "", int(counts["running"]), int(counts["waiting"]))


def _get(url: str) -> httpx.Response:
    try:  # on this machine: no proxy stands between, and certificates would take 20 ms of a core to load
        return httpx.get(url, timeout=ASK_S, trust_env=False, verify=False)
    except httpx.HTTPError as error:
        raise OSError(f"{url}: {error!r}") from error
