"""An entry that serves, and how one is asked what its stages do: our proxy's status table, or a server's `/metrics`."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.client.target import Target
from bench.layouts.batches import Look, StageNow

LOOK_S = 10.0
_REQUESTS = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Up:
    """Something that serves an entry.

    Attributes:
        target: whom to load. model: as it is called there.
        ready_s: from its start until it was ready.
        look: what its stages run now. traces: folder of its phase stamps, or None.
        shared_cores: its devices are virtual, and there are fewer cores than devices.
    """

    target: Target
    model: str
    ready_s: float
    look: Look
    traces: Path | None = None
    shared_cores: bool = False


def status_table(url: str) -> Sequence[StageNow]:
    """The instances of our proxy at `url`. Raises OSError where it does not answer."""
    return [_stage(one) for one in json.loads(_get(f"{url}/instances"))["instances"]]


def server_metrics(url: str, instance: str, life: str) -> StageNow:
    """A plain server at `url`. Raises OSError where it does not answer."""
    counts = {"running": 0.0, "waiting": 0.0}
    for name, value in _REQUESTS.findall(_get(f"{url}/metrics").decode()):
        counts[name] += float(value)
    return StageNow(instance, "EPD", life, "", int(counts["running"]), int(counts["waiting"]))


def _stage(one: dict[str, Any]) -> StageNow:
    said = one["stage"] or {}
    down = "" if one["up"] else one["reason"] or "it is down"
    counts = (int(said.get(name, 0)) for name in ("running", "waiting"))
    return StageNow(one["id"], one["role"], one["incarnation"], down, *counts)


def _get(url: str) -> bytes:
    # No proxy of the environment's: what is asked is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=LOOK_S) as answer:
            found: bytes = answer.read()
    except http.client.HTTPException as error:  # half an answer
        raise OSError(f"{url}: {error!r}") from error
    return found
