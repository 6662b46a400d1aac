"""What a profile says beside times: device, versions, memory of each role, what is known of pairs from elsewhere."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.doctor.ascend_files import read_ascend
from deploy.doctor.gather import read_packages
from deploy.memory.preview import preview
from deploy.planner.interference import read_interference_profile
from deploy.planner.profile import DECODE, ENCODE, PREFILL, DeviceProfile
from deploy.planner.steps import role_of
from epd_serve import __version__
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.model_facts import read_model_facts
from epd_serve.model_support import why_not_encoder_free
from epd_serve.sim.profile import Capacity, Profile
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import read_properties
from npu_ops.vendor_tool import ask

BLOCK_TOKENS = {"cpu": 32, "cuda": 16, "npu": 128}
"""vLLM's `--block-size` where nobody gives one; ours on CPU."""
STAGES = {ENCODE: "E", PREFILL: "P", DECODE: "D"}


def about(
    name: str,
    model: str,
    inventory: DeviceInventory,
    devices: int,
    sizes: Sequence[int],
    stage_args: Sequence[str],
    *,
    multimodal: bool,
    interference: Path | None,
) -> tuple[DeviceProfile, str]:
    """A profile without times, and why its memory is unknown, or "".

    Args:
        name: of the model. model: its folder, or a hub's name, of which no sizes are known.
        devices: that the machine is divided into. sizes: of tensor parallelism.
        interference: of operators on such a device, as `epd-bench interference` wrote it;
            pairs that no part measures have what follows from it.

    Raises:
        ConfigError: `interference` cannot be read.
    """
    properties = read_properties(inventory)
    memory = next((one.total_bytes for one in properties if one.total_bytes), 0)
    device = next((one.name for one in properties if one.name), inventory.kind)
    if inventory.kind == "cpu":
        cores = len(os.sched_getaffinity(0))
        device, memory = f"{device}, {cores // devices} of {cores} cores", memory // devices
    weights, kv_token, why = _memory(model, inventory.kind, sizes, stage_args, multimodal=multimodal)
    more_kv = _kv_of_encoder(model, inventory.kind, sizes, stage_args) if multimodal and not why else {}
    stage = Profile(capacity=Capacity(block_tokens=BLOCK_TOKENS[inventory.kind]), kv_bytes_per_token=kv_token)
    made = DeviceProfile(
        name,
        device,
        {1: stage},
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        versions={"epd-serve": __version__, **read_packages().versions, **driver_versions(inventory.kind)},
        slowdown=_pairs(interference) if interference is not None else {},
        host_devices=devices if inventory.kind == "cpu" else len(inventory.ids),
        weight_bytes=weights,
        encoder_free_kv_tokens=more_kv,
        memory_bytes=memory,
    )
    return made, why


def driver_versions(kind: str) -> dict[str, str]:
    """Of the device's driver, and of CANN on NPU; without what nobody tells, and none on cpu."""
    if kind == "npu":
        files = read_ascend(os.environ)
        return {name: told for name, told in (("driver", files.driver), ("cann", files.cann)) if told}
    if kind == "cuda":
        told, _ = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        return {"driver": told.split()[0]} if told and told.strip() else {}
    return {}


def _memory(
    model: str, kind: str, sizes: Sequence[int], stage_args: Sequence[str], *, multimodal: bool
) -> tuple[dict[str, dict[int, int]], int, str]:
    """Bytes of weights by role and size, bytes of a token's KV, and why both are unknown, or "". On CPU the plan is of
    the host's memory, which has that of all ranks."""
    weights: dict[str, dict[int, int]] = {}
    kv_token = 0
    try:
        for tp, roles in itertools.product(sizes, ("E P D", "E PD", "EP D", "EPD") if multimodal else ("P D", "EPD")):
            layout = parse("-".join(f"{role}:tp{tp}" for role in roles.split()))
            _, shown = preview(layout, model, kind, None, stage_args)
            for one in shown["instances"]:
                weights.setdefault(role_of(one["id"]), {})[tp] = one["weights_bytes"] // (tp if kind == "cpu" else 1)
                if one["kv_tokens"] and not kv_token:
                    kv_token = one["kv_bytes"] * (1 if kind == "cpu" else tp) // one["kv_tokens"]
    except ConfigError as error:
        return {}, Profile().kv_bytes_per_token, str(error)
    return weights, kv_token, ""


def _kv_of_encoder(model: str, kind: str, sizes: Sequence[int], stage_args: Sequence[str]) -> dict[int, int]:
    """Tokens of KV that a PD alone on its devices holds more without the encoder, by size. None where the model cannot
    do without: a plan that asks for it says so."""
    facts = read_model_facts(model)
    if facts is None or why_not_encoder_free(facts.architecture, None):
        return {}
    more = {}
    for tp in sizes:
        kv_tokens = []
        for free in (False, True):
            _, shown = preview(parse(f"E:tp{tp}-PD:tp{tp}"), model, kind, None, stage_args, encoder_free=free)
            kv_tokens += [one["kv_tokens"] for one in shown["instances"] if role_of(one["id"]) == "PD"]
        more[tp] = kv_tokens[1] - kv_tokens[0]
    return more


def _pairs(path: Path) -> dict[str, float]:
    """Of two stages that compete for all cores, the mean of what each suffers beside the other."""
    interference = read_interference_profile(path)
    found = {}
    for one, other in itertools.combinations(STAGES, 2):
        both = [interference.between(STAGES[a], STAGES[b]) for a, b in ((one, other), (other, one))]
        known = [value for value in both if value is not None]
        if known:
            found[f"{one}+{other}"] = max(1.0, sum(known) / len(known))
    return found
