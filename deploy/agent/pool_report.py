"""What Mooncake's master says about itself over HTTP: segments, memory, keys. No Mooncake needed."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass, field

TIMEOUT_S = 3.0
_LIMIT = 64 << 20
_SAMPLE = re.compile(r"^(\w+)(?:\{segment=\"([^\"]*)\"[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Segment:
    """Memory that one process gives. `name`: its `host:port`. Bytes."""

    name: str
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True)
class PoolReport:
    """The second tier as a whole. Bytes."""

    features: int = 0
    clients: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    segments: tuple[Segment, ...] = field(default=())


def ask_master(metrics: str) -> PoolReport:
    """Asks the master at this base URL.

    Raises:
        OSError: it does not answer in time.
    """
    return parse_metrics(_get(f"{metrics}/metrics"))


def pool_keys(metrics: str) -> list[str]:
    """Names of all values, with their namespace.

    Raises:
        OSError: it does not answer in time.
    """
    return _get(f"{metrics}/get_all_keys").split()


def parse_metrics(text: str) -> PoolReport:
    """From Prometheus text; what is missing counts as 0."""
    totals: dict[str, int] = {}
    used: dict[str, int] = {}
    capacity: dict[str, int] = {}
    for name, segment, value in _SAMPLE.findall(text):
        try:
            amount = int(float(value))
        except (ValueError, OverflowError):
            continue
        if name == "segment_allocated_bytes":
            used[segment] = amount
        elif name == "segment_total_capacity_bytes":
            capacity[segment] = amount
        else:
            totals[name] = amount
    return PoolReport(
        features=totals.get("master_key_count", 0),
        clients=totals.get("master_active_clients", 0),
        used_bytes=totals.get("master_allocated_bytes", 0),
        capacity_bytes=totals.get("master_total_capacity_bytes", 0),
        segments=tuple(Segment(name, used.get(name, 0), size) for name, size in sorted(capacity.items()) if size),
    )


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return str(answer.read(_LIMIT).decode(errors="replace"))
