"""`epd-serve layout SPEC --model DIR`: the memory plan of a deployment that nobody has started, for any device size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.memory.check import share_memory
from deploy.memory.plan import memory_json, memory_table
from deploy.options.stage_args import parse_stage_args
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.model_facts import check_model_fits, read_model_facts
from epd_serve.model_support import check_encoder_free
from epd_serve.placement import lower
from npu_ops.discovery import DeviceInventory, DiscoveryError, discover
from npu_ops.properties import DeviceProperties, read_properties


def preview(
    layout: Layout,
    model: str,
    kind: str,
    device_gib: float | None,
    stage_args: Sequence[str],
    *,
    encoder_free: bool = False,
    slab_bytes: int | None = 0,
) -> tuple[str, dict[str, Any]]:
    """The table with its warnings, and the same as data.

    Args:
        kind: `auto`, `npu`, `cuda` or `cpu`. device_gib: of each device; None: ask this machine's.
        slab_bytes: see `Sizing`.

    Raises:
        ConfigError: no such model or devices, sizes that nothing tells, or stages that do not fit.
    """
    facts = read_model_facts(model)
    if facts is None:
        raise ConfigError(f"--model {model} is not a folder on this machine: its sizes are unknown", param="--model")
    check_model_fits(facts, layout)
    if encoder_free:
        check_encoder_free(facts.architecture, layout, None)
    inventory, properties = _devices(layout, kind, device_gib)
    plans = lower(layout, inventory.allot(layout.device_count))
    words = parse_stage_args(stage_args, plans, encoder_free=encoder_free)
    outcome = share_memory(plans, facts, inventory, words, slab_bytes=slab_bytes, properties=properties)
    if outcome.plan is None:
        reasons = "; ".join(outcome.warnings) or f"{model} does not tell the sizes of its weights or encoders"
        raise ConfigError(f"no memory plan: {reasons}", param="--model")
    lines = [f"{layout} with {facts.directory.name}", "", memory_table(outcome.plan)]
    lines += [f"warning: {warning}" for warning in outcome.warnings]
    shown = {"layout": str(layout), "instances": memory_json(outcome.plan), "warnings": list(outcome.warnings)}
    return "\n".join(lines), shown


def _devices(layout: Layout, kind: str, device_gib: float | None) -> tuple[DeviceInventory, Sequence[DeviceProperties]]:
    if device_gib is None:
        try:
            inventory = discover(kind)
        except DiscoveryError as error:
            raise ConfigError(str(error), param="--device") from error
        if inventory.kind != "cpu" and not inventory.ids:
            raise ConfigError(
                f"no {inventory.kind} device found: {inventory.note}; --device-memory GIB plans for one elsewhere",
                param="--device",
            )
        return inventory, read_properties(inventory)
    if device_gib <= 0:
        raise ConfigError(f"--device-memory {device_gib:g} is not a size", param="--device-memory")
    if kind not in ("npu", "cuda"):
        raise ConfigError("--device-memory needs --device npu or cuda", param="--device")
    ids = tuple(range(layout.device_count))
    total = int(device_gib * (1 << 30))
    inventory = DeviceInventory("npu" if kind == "npu" else "cuda", ids, ("",) * len(ids))
    return inventory, [DeviceProperties(index, "", total_bytes=total, free_bytes=total) for index in ids]
