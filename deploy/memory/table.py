"""The memory plan as a table: what each process gets of its device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.memory.placement_table import table
from deploy.memory.plan import MemoryPlan, Neighbours
from epd_serve.memory_shares import ENGINE_DEFAULT_SHARE, Grant

_GIB = 1 << 30


def gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if abs(size) >= _GIB else f"{size / (1 << 20):.0f} MiB"


def memory_table(plan: MemoryPlan) -> str:
    """Rows of all instances, and a line for each set of devices."""
    header = ("instance", plan.kind, "weights", "activations", "runtime", "KV cache", "tokens", "share")
    rows: list[tuple[str, ...]] = [header]
    for group in plan.groups:
        for one, grant in zip(group.plans, group.division.grants, strict=True):
            need = grant.need
            sizes = (gib(need.weights), gib(need.activations + grant.longest), gib(need.runtime))
            cache = (gib(grant.kv), str(grant.tokens)) if need.kv_token else ("-", "-")
            rows.append((one.id, group.devices(one), *sizes, *cache, _share(grant, plan.kind)))
    return "\n".join((table(rows), *(f"  {_summary(group, plan.kind)}" for group in plan.groups)))


def show_memory(plan: MemoryPlan, folder: Path, say: Callable[[str], None]) -> None:
    """Into `memory.txt` of the run directory; said, too, where instances share a device."""
    text = memory_table(plan)
    (folder / "memory.txt").write_text(text + "\n", encoding="utf-8")
    if plan.shared_devices:
        say(f"memory of the devices:\n{text}")


def memory_json(plan: MemoryPlan) -> list[dict[str, Any]]:
    return [
        {
            "id": one.id,
            "devices": list(one.devices),
            "weights_bytes": grant.need.weights,
            "activation_bytes": grant.need.activations + grant.longest,
            "runtime_bytes": grant.need.runtime,
            "kv_bytes": grant.kv,
            "kv_tokens": grant.tokens,
            "memory_share": grant.share,
        }
        for group in plan.groups
        for one, grant in zip(group.plans, group.division.grants, strict=True)
    ]


def _share(grant: Grant, kind: str) -> str:
    if kind == "cpu":
        return "-"
    if grant.share is not None:
        return f"{grant.share:.4f}".rstrip("0")
    return f"{ENGINE_DEFAULT_SHARE:g} (engine)" if grant.need.kv_token else "-"


def _summary(group: Neighbours, kind: str) -> str:
    division = group.division
    free = f", {gib(division.free)} free now" if division.free < division.total else ""
    if kind == "cpu":
        host = f"host {group.node}".rstrip()
        return f"{host}: {gib(division.taken + group.shared)} of {gib(division.total)}{free}, shared memory included"
    return f"{kind} {group.devices(group.plans[0])}: {gib(division.taken)} of {gib(division.total)}{free}"
