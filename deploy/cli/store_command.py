"""`epd-serve store ls|stat|clear`: looks into the MM Store of a running launch, from a process of its own; and what
Mooncake's master says about itself over HTTP. No Mooncake is needed for that."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.agent.second_tier import recorded_pool
from deploy.host.environment import module_command, module_environment
from deploy.host.launches import RunningLaunch, choose_launch
from deploy.memory.placement_table import table
from epd_serve.errors import EpdError
from store.arena import Arena
from store.errors import StoreError, StoreUnavailableError

KEY_SHOWN = 16
NAMESPACE = "epd/"  # of our keys in the second tier, `store.mooncake.client.MooncakeConfig`
PURGE_TIMEOUT_S = 30.0
TIMEOUT_S = 3.0
_LIMIT = 64 << 20
_SAMPLE = re.compile(r"^(\w+)(?:\{segment=\"([^\"]*)\"[^}]*\})? (\S+)$", re.MULTILINE)


def run_store(*, action: str, launch: str | None, as_json: bool, root: Path | None = None) -> int:
    """Print the answer of one action.

    Raises:
        NoLaunchError, ConfigError: which launch is meant. EpdError: its arena does not answer.
    """
    chosen = choose_launch(launch, root)
    try:
        with closing(Arena.attach(chosen.arena, prefault=False)) as arena:
            answer, text = {"ls": _ls, "stat": _stat, "clear": _clear}[action](chosen, arena)
    except StoreError as error:
        raise EpdError(f"the arena of launch {chosen.id} cannot be read: {error}") from error
    print(json.dumps(answer, indent=2) if as_json else text)
    return 0


def _ls(launch: RunningLaunch, arena: Arena) -> tuple[Any, str]:
    answer: list[dict[str, Any]] = []
    rows = [("key", "shape", "dtype", "size", "leased", "idle")]
    for one in arena.entries():
        meta, leased, idle_s = one.meta, one.leases, one.age_s
        told = {"key": meta.key, "shape": list(meta.shape), "dtype": meta.dtype, "nbytes": meta.nbytes}
        answer.append(told | {"leases": leased, "idle_s": round(idle_s, 3)})
        shape = "×".join(map(str, meta.shape))
        key, bytes_ = meta.key[:KEY_SHOWN], size(meta.nbytes)
        rows.append((key, shape, meta.dtype, bytes_, str(leased or "-"), f"{idle_s:.0f} s"))
    return answer, table(rows, indent="") if answer else f"launch {launch.id} keeps no features now"


def _stat(launch: RunningLaunch, arena: Arena) -> tuple[Any, str]:
    stats = arena.stats()
    master, metrics = recorded_pool(launch.path)
    report, trouble = _report(master, metrics)
    answer: dict[str, Any] = {"launch": launch.id, "arena": asdict(stats), "pool": None}
    lines = [
        f"launch {launch}",
        f"arena   {size(stats.used_bytes)} of {size(stats.capacity_bytes)} used, {stats.features} features, "
        f"{stats.leased} leased",
        f"        puts {stats.puts}  hits {stats.hits}  misses {stats.misses}  evictions {stats.evictions}  "
        f"corrupt {stats.corrupt}  reclaimed {stats.reclaimed}",
    ]
    if report is not None:
        lines.append(
            f"pool    {size(report.used_bytes)} of {size(report.capacity_bytes)} used, {report.features} features, "
            f"{report.clients} clients, master {master}"
        )
        lines += [
            f"        {one.name}  {size(one.used_bytes)} of {size(one.capacity_bytes)}" for one in report.segments
        ]
    else:
        lines.append(f"pool    {trouble}")
    if master:
        answer["pool"] = {"master": master, **(asdict(report) if report else {"trouble": trouble})}
    return answer, "\n".join(lines)


def _report(master: str, metrics: str) -> tuple[PoolReport | None, str]:
    if not master:
        return None, "none: features stay on this host"
    if not metrics:
        return None, f"master {master}, which was given: ask its own metrics port"
    try:
        return ask_master(metrics), ""
    except OSError as error:
        return None, f"master {master} does not answer: {error}"


def _clear(launch: RunningLaunch, arena: Arena) -> tuple[Any, str]:
    entries = arena.entries()
    leased = {one.meta.key for one in entries if one.leases}
    removed = [one.meta.key for one in entries if one.meta.key not in leased and arena.remove(one.meta.key)]
    answer: dict[str, Any] = {"launch": launch.id, "removed": len(removed), "leased": len(leased)}
    text = f"removed {len(removed)} features; {len(leased)} stay, which requests hold"
    master, metrics = recorded_pool(launch.path)
    if not master:
        return answer, text
    try:
        answer["pool_removed"] = _clear_pool(master, metrics, set(removed), leased)
        text += f"; removed {answer['pool_removed']} from the second tier"
    except (OSError, StoreUnavailableError, subprocess.TimeoutExpired) as error:
        answer["pool_trouble"] = str(error)
        text += f"; the second tier was not cleared: {error}"
    return answer, text


def _clear_pool(master: str, metrics: str, removed: set[str], leased: set[str]) -> int:
    """Removes what the arena has let go, and all else where the master can list it. How many there were."""
    keys = set(removed)
    if metrics:
        keys |= {name.removeprefix(NAMESPACE) for name in pool_keys(metrics) if name.startswith(NAMESPACE)}
    keys -= leased
    if not keys:
        return 0
    purging = subprocess.run(
        module_command("store.mooncake.tier", master),
        env=module_environment(),
        input="\n".join(sorted(keys)),
        capture_output=True,
        text=True,
        timeout=PURGE_TIMEOUT_S,
        check=False,
    )
    if purging.returncode != 0:
        raise StoreUnavailableError(purging.stderr.strip().rpartition("\n")[2])
    return int(purging.stdout.split()[-1])


def size(nbytes: int) -> str:
    """`8.6 MB`; decimal, as the sizes in docs/guides/sizing.md."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        amount /= 1000
        if amount < 999.95 or unit == "GB":
            break
    return f"{amount:.1f} {unit}"


# --- what Mooncake's master says ----------------------------------------------------------------------------------


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
