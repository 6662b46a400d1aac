"""Which devices this machine has, asked of npu-smi, nvidia-smi or the device files. Imports no framework.

The launcher plans with these ids and hands them to the stages by `ASCEND_RT_VISIBLE_DEVICES` or
`CUDA_VISIBLE_DEVICES`; what the operator set in those variables limits what is found. On CPU devices are virtual:
as many as the layout asks for (`core_sets.py` maps them to cores).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from npu_ops.npu_smi import parse_mapping
from npu_ops.vendor_tool import ask

Kind = Literal["npu", "cuda", "cpu"]


class DiscoveryError(ValueError):
    """The operator's list of visible devices names something that is not there."""


@dataclass(frozen=True)
class DeviceInventory:
    """Devices that may be used.

    Attributes:
        kind: `npu`, `cuda` or `cpu`.
        ids: usable ids, in the operator's order; empty on `cpu`, where devices are virtual.
        names: product name per id.
        note: why nothing was found, for the error message; else "".
    """

    kind: Kind
    ids: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    note: str = ""

    def allot(self, needed: int) -> tuple[int, ...]:
        """The ids to place `needed` devices on: all found, or on CPU just as many virtual ones."""
        return tuple(range(needed)) if self.kind == "cpu" else self.ids


def discover(kind: str = "auto") -> DeviceInventory:
    """Find devices of a kind; `auto` prefers NPUs, then CUDA, then the CPU.

    Returns:
        An inventory, empty with a `note` when an explicitly asked kind is not there.

    Raises:
        DiscoveryError: a visible-devices variable names an unknown device.
        ValueError: unknown kind.
    """
    if kind == "npu":
        return _npu()
    if kind == "cuda":
        return _cuda()
    if kind == "cpu":
        return DeviceInventory("cpu")
    if kind != "auto":
        raise ValueError(f"unknown device kind {kind!r}: auto, npu, cuda or cpu")
    for inventory in (_npu(), _cuda()):
        if inventory.ids:
            return inventory
    return DeviceInventory("cpu")


def _npu() -> DeviceInventory:
    table, note = ask("npu-smi", "info", "-m")
    if table is None:
        return _visible("npu", _numbered_files("/dev", "davinci", "Ascend NPU"), {}, "ASCEND_RT_VISIBLE_DEVICES", note)
    names = {logic: chip.name for logic, chip in parse_mapping(table).items()}
    return _visible("npu", names, {}, "ASCEND_RT_VISIBLE_DEVICES", note)


def _cuda() -> DeviceInventory:
    table, note = ask("nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader")
    if table is None:
        return _visible("cuda", _numbered_files("/dev", "nvidia", "NVIDIA GPU"), {}, "CUDA_VISIBLE_DEVICES", note)
    names, uuids = parse_nvidia_query(table)
    return _visible("cuda", names, uuids, "CUDA_VISIBLE_DEVICES", note)


def parse_nvidia_query(table: str) -> tuple[dict[int, str], dict[str, int]]:
    """Index → name and UUID → index from `--query-gpu=index,uuid,name`; error lines of lost GPUs are skipped."""
    names: dict[int, str] = {}
    uuids: dict[str, int] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",", 2)]
        if len(cells) == 3 and cells[0].isdecimal():
            names[int(cells[0])] = cells[2]
            uuids[cells[1]] = int(cells[0])
    return names, uuids


def _visible(kind: Kind, names: dict[int, str], uuids: dict[str, int], variable: str, note: str) -> DeviceInventory:
    visible = os.environ.get(variable)
    ids = sorted(names)
    if visible is not None and names:
        ids = [_resolve(entry.strip(), names, uuids, variable) for entry in visible.split(",") if entry.strip()]
        if len(set(ids)) != len(ids):
            raise DiscoveryError(f"{variable}={visible} names a device twice")
        note = f"{variable} is empty" if not ids else note
    return DeviceInventory(kind, tuple(ids), tuple(names[i] for i in ids), "" if ids else note)


def _resolve(entry: str, names: dict[int, str], uuids: dict[str, int], variable: str) -> int:
    if entry.isdecimal() and int(entry) in names:
        return int(entry)
    matches = [index for uuid, index in uuids.items() if uuid.startswith(entry)] if entry.startswith("GPU-") else []
    if len(matches) == 1:
        return matches[0]
    present = ", ".join(map(str, sorted(names)))
    raise DiscoveryError(f"{variable} names device {entry!r}, but this machine has {present}; correct or unset it")


def _numbered_files(folder: str, prefix: str, name: str) -> dict[int, str]:
    """Device files such as /dev/davinci0: what a container without the vendor's tool still shows."""
    matches = (re.fullmatch(rf"{prefix}(\d+)", path.name) for path in Path(folder).glob(f"{prefix}*"))
    return {int(match.group(1)): name for match in matches if match is not None}
