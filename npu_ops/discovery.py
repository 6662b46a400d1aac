"""Which devices this machine has, asked of npu-smi, nvidia-smi or the device files. Imports no framework.

The launcher plans with these ids and hands them to the stages by `ASCEND_RT_VISIBLE_DEVICES` or
`CUDA_VISIBLE_DEVICES`; what the operator set in those variables limits what is found. On CPU devices are virtual:
as many as the layout asks for (`core_sets.py` maps them to cores).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["npu", "cuda", "cpu"]

TOOL_TIMEOUT_S = 15.0
"""nvidia-smi takes seconds without persistence mode; a hung driver must not hang the launcher."""

_COLUMNS = re.compile(r"\s{2,}|\t")


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
    for found in (_npu(), _cuda()):
        if found.ids:
            return found
    return DeviceInventory("cpu")


def _npu() -> DeviceInventory:
    table, note = _ask("npu-smi", "info", "-m")
    names = parse_npu_mapping(table) if table is not None else _numbered_files("/dev", "davinci", "Ascend NPU")
    return _visible("npu", names, {}, "ASCEND_RT_VISIBLE_DEVICES", note)


def _cuda() -> DeviceInventory:
    table, note = _ask("nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader")
    if table is None:
        return _visible("cuda", _numbered_files("/dev", "nvidia", "NVIDIA GPU"), {}, "CUDA_VISIBLE_DEVICES", note)
    names, uuids = parse_nvidia_query(table)
    return _visible("cuda", names, uuids, "CUDA_VISIBLE_DEVICES", note)


def parse_npu_mapping(table: str) -> dict[int, str]:
    """Logic id → chip name from `npu-smi info -m`. Rows without a logic id (the Mcu) are no devices.

    An A3 board shows two chips per NPU, each with its own logic id; that id is what the runtime takes.
    """
    rows = [_COLUMNS.split(line.strip()) for line in table.splitlines() if line.strip()]
    if not rows or "Chip Logic ID" not in rows[0]:
        return {}
    header = rows[0]
    logic, name = header.index("Chip Logic ID"), header.index("Chip Name")
    return {int(row[logic]): row[name] for row in rows[1:] if len(row) == len(header) and row[logic].isdecimal()}


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
    asked = os.environ.get(variable)
    ids = sorted(names)
    if asked is not None and names:
        ids = [_resolve(entry.strip(), names, uuids, variable) for entry in asked.split(",") if entry.strip()]
        if len(set(ids)) != len(ids):
            raise DiscoveryError(f"{variable}={asked} names a device twice")
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


def _ask(tool: str, *arguments: str) -> tuple[str | None, str]:
    """A tool's output, or None and why there is none."""
    path = shutil.which(tool)
    if path is None:
        return None, f"{tool} is not on PATH"
    try:
        process = subprocess.Popen(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return None, f"{tool} could not be run: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=TOOL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # Killed but not waited for: a process that hangs inside a driver does not die before the driver answers.
        os.killpg(process.pid, signal.SIGKILL)
        return None, f"{tool} did not answer within {TOOL_TIMEOUT_S:g} s"
    if process.returncode != 0:
        last = (errors.strip() or output.strip()).splitlines()[-1:]
        return None, f"{tool} failed: {last[0] if last else f'exit code {process.returncode}'}"
    return output, f"{tool} lists no device"


def _numbered_files(folder: str, prefix: str, name: str) -> dict[int, str]:
    """Device files such as /dev/davinci0: what a container without the vendor's tool still shows."""
    found = (re.fullmatch(rf"{prefix}(\d+)", path.name) for path in Path(folder).glob(f"{prefix}*"))
    return {int(match.group(1)): name for match in found if match is not None}
