"""What the devices of this machine are before any framework is loaded: name, cores, memory, and who is on them now.

Read from `npu-smi`, `nvidia-smi`, CANN's platform files, /proc. What a tool does not tell stays unknown, with a `note`
that says why; nothing here raises or hangs. None of it has run on a card: the tools' tables are from recorded outputs.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from npu_ops.discovery import DeviceInventory
from npu_ops.npu_smi import NpuChip, NpuUsage, parse_mapping, parse_platform, parse_usage, soc_of
from npu_ops.vendor_tool import ask

_MIB = 1 << 20
_CANN_HOME = "/usr/local/Ascend/ascend-toolkit/latest"  # also where CANN 9.1 links its own folder to


@dataclass(frozen=True)
class DeviceUser:
    """A process that holds memory of the device now. `bytes`: None where the tool does not say."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class DeviceProperties:
    """One device.

    Attributes:
        index: its id as in `DeviceInventory.ids`; 0 on cpu, where one entry stands for the host of all virtual devices.
        name: the product's: "910B3", "NVIDIA H200".
        soc: as CANN calls it, "Ascend910B3"; "" where unknown, and on cuda and cpu.
        cores: {"cube": 24, "vector": 48}, {"cpu": 16}; empty where only a framework can tell, as for CUDA.
        total_bytes, free_bytes: device memory; on cpu the host's MemTotal and MemAvailable, or its container's part.
        users: processes of anyone on the device; empty on cpu.
        note: why something above is unknown, or "".
    """

    index: int
    name: str
    soc: str = ""
    cores: Mapping[str, int] = field(default_factory=dict)
    total_bytes: int | None = None
    free_bytes: int | None = None
    users: tuple[DeviceUser, ...] = ()
    note: str = ""


def read_properties(inventory: DeviceInventory) -> tuple[DeviceProperties, ...]:
    """Of the inventory's devices, in its order; one entry on cpu. Takes up to three calls of a vendor's tool."""
    if inventory.kind == "cpu":
        return (_host(),)
    return _npus(inventory) if inventory.kind == "npu" else _gpus(inventory)


def _npus(inventory: DeviceInventory) -> tuple[DeviceProperties, ...]:
    mapping, note = ask("npu-smi", "info", "-m")
    table, note = ask("npu-smi", "info") if mapping is not None else (None, note)
    if mapping is None or table is None:
        return _unknown(inventory, note)
    chips, usages = parse_mapping(mapping), parse_usage(table)
    socs: dict[str, str] = {}  # by product name: the chips of one product are of one SoC
    properties = []
    for index, name in zip(inventory.ids, inventory.names, strict=True):
        chip = chips.get(index)
        if chip is None:
            properties.append(DeviceProperties(index, name, note=f"npu-smi info -m shows no device {index}"))
            continue
        usage = usages.get((chip.npu, chip.chip))
        if name not in socs:
            socs[name] = _soc(name, chip)
        properties.append(_npu(index, usage.name if usage is not None else name, socs[name], usage))
    return tuple(properties)


def _npu(index: int, name: str, soc: str, usage: NpuUsage | None) -> DeviceProperties:
    cores, note = _cores_of_soc(soc)
    if usage is None:
        return DeviceProperties(index, name, soc, cores, note=f"npu-smi info shows no memory of device {index}")
    return DeviceProperties(
        index,
        name,
        soc,
        cores,
        usage.total_bytes,
        usage.total_bytes - usage.used_bytes,
        tuple(DeviceUser(process.pid, process.name, process.bytes) for process in usage.processes),
        note,
    )


def _soc(name: str, chip: NpuChip) -> str:
    if soc := soc_of(name):
        return soc
    board, _ = ask("npu-smi", "info", "-t", "board", "-i", str(chip.npu), "-c", str(chip.chip))
    return soc_of(name, board or "")


def _cores_of_soc(soc: str) -> tuple[dict[str, int], str]:
    """From CANN's platform file of that SoC; none, and why."""
    home = os.environ.get("ASCEND_HOME_PATH") or _CANN_HOME
    if not soc:
        return {}, "npu-smi does not tell the SoC, so its cores are not known"
    for path in sorted(Path(home).glob(f"*/data/platform_config/{soc}.ini")):
        try:
            if cores := parse_platform(path.read_text(encoding="utf-8", errors="replace")):
                return cores, ""
        except OSError as error:
            return {}, f"{path} cannot be read: {error.strerror}"
    return {}, f"CANN has no platform file of {soc} below {home}"


def _gpus(inventory: DeviceInventory) -> tuple[DeviceProperties, ...]:
    table, note = ask(
        "nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"
    )
    if table is None:
        return _unknown(inventory, note)
    apps, note = ask(
        "nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"
    )
    gpus, users = parse_gpus(table), parse_gpu_users(apps or "")
    return tuple(
        _gpu(index, name, gpus.get(index), users, "" if apps is not None else note)
        for index, name in zip(inventory.ids, inventory.names, strict=True)
    )


@dataclass(frozen=True)
class GpuMemory:
    """A row of `nvidia-smi --query-gpu`."""

    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None


def _gpu(
    index: int, name: str, gpu: GpuMemory | None, users: Mapping[str, list[DeviceUser]], note: str
) -> DeviceProperties:
    if gpu is None:
        return DeviceProperties(index, name, note=f"nvidia-smi shows no device {index}")
    if gpu.total_bytes is None:
        note = "nvidia-smi does not tell this device's memory"
    return DeviceProperties(
        index,
        gpu.name,
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        users=tuple(users.get(gpu.uuid, ())),
        note=note,
    )


def parse_gpus(table: str) -> dict[int, GpuMemory]:
    """By index, from `--query-gpu=index,uuid,name,memory.total,memory.free` without units (MiB)."""
    gpus = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= 5 and cells[0].isdecimal():
            name = ", ".join(cells[2:-2])
            gpus[int(cells[0])] = GpuMemory(cells[1], name, _mib(cells[-2]), _mib(cells[-1]))
    return gpus


def parse_gpu_users(table: str) -> dict[str, list[DeviceUser]]:
    """By the GPU's UUID, from `--query-compute-apps=gpu_uuid,pid,process_name,used_memory` without units (MiB)."""
    users: dict[str, list[DeviceUser]] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= 4 and cells[1].isdecimal():
            users.setdefault(cells[0], []).append(
                DeviceUser(int(cells[1]), ", ".join(cells[2:-1]), _mib(cells[-1]))  # a path may hold a comma
            )
    return users


def _mib(cell: str) -> int | None:
    """`[N/A]` and the like, e.g. where memory is the host's or the caller may not know, are None."""
    return int(cell) * _MIB if cell.isdecimal() else None


def _unknown(inventory: DeviceInventory, note: str) -> tuple[DeviceProperties, ...]:
    return tuple(
        DeviceProperties(index, name, note=note) for index, name in zip(inventory.ids, inventory.names, strict=True)
    )


def host_memory() -> tuple[int, int]:
    """Bytes of host memory, all and available: the machine's, or the part of it that this container may use."""
    memory = psutil.virtual_memory()
    total, free = container_memory() or (memory.total, memory.available)
    return min(total, memory.total), min(free, memory.available)


def _host() -> DeviceProperties:
    total, free = host_memory()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return DeviceProperties(
        0, name or platform.machine(), cores={"cpu": len(os.sched_getaffinity(0))}, total_bytes=total, free_bytes=free
    )


_CGROUP = Path("/sys/fs/cgroup")
_LIMIT_USAGE = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_RECLAIMABLE = ({"active_file", "inactive_file"}, {"total_active_file", "total_inactive_file"})


def container_memory(root: Path = _CGROUP) -> tuple[int, int] | None:
    """Memory that this process's container may use, by cgroup v2 or v1: /proc/meminfo shows the host's. Usage
    counts cached files, which the kernel drops when memory is needed; those are free.

    Returns:
        (limit, what of it is free) in bytes; None where nothing limits, or nothing can be read.
    """
    for (limit_file, usage_file), names in zip(_LIMIT_USAGE, _RECLAIMABLE, strict=True):
        try:
            limit, usage = (root / limit_file).read_text(), int((root / usage_file).read_text())
            stat = (root / limit_file).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if not limit.strip().isdecimal():
            return None  # "max"
        rows = (line.split() for line in stat.splitlines())
        cached = sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in names)
        return int(limit), max(0, int(limit) - max(0, usage - cached))
    return None
