"""What a measurement reads at the proxy's own endpoints: who is up, what is in flight, counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from epd_serve.errors import StageError

TIMEOUT_S = 10.0
LOOK_S = 0.2


def instances(url: str) -> list[dict[str, Any]]:
    """The status table. Raises StageError where it cannot be read."""
    values: list[dict[str, Any]] = _get(url, "/instances").json()["instances"]
    return values


def held(url: str) -> dict[str, float]:
    """What requests hold, by instance or gauge; empty when nothing is in flight."""
    values = {
        f"{view['id']} {work}": float(count)
        for view in instances(url)
        for work, count in view["in_flight"].items()
        if count
    }
    in_flight = counters(url, "epd_proxy_in_flight")
    return values | {name: value for name, value in in_flight.items() if value}


def counters(url: str, name: str) -> dict[str, float]:
    """Every series of a metric, by its name with labels."""
    return parse_metrics(_get(url, "/metrics").text, name)


def parse_metrics(text: str, name: str) -> dict[str, float]:
    """The series of `name` in Prometheus' text format."""
    values = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name:
            values[series] = float(value)
    return values


def until(holds: Callable[[], object], timeout_s: float) -> bool:
    """Wait for it; False if it does not come true in time."""
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= end:
            return False
        time.sleep(LOOK_S)
    return True


def _get(url: str, path: str) -> httpx.Response:
    try:
        return httpx.get(f"{url}{path}", timeout=TIMEOUT_S, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise StageError(f"{url}{path}: {error!r}", stage=url) from error
