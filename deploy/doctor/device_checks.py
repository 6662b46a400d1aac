"""The devices: that there are enough of them, their free memory, and who else is on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding, error, ok, warning
from npu_ops.properties import DeviceProperties

_GIB = 1 << 30
_TAKEN = 0.1
"""More than this share of a device in use is somebody's: the drivers themselves keep 3 to 5 %."""


def device_checks(facts: Facts) -> Iterator[Finding]:
    wanted = facts.wanted
    if wanted.refusal:
        yield error(
            "layout", wanted.refusal, "it cannot be served here", "epd-serve layout SPEC shows what a layout means"
        )
    elif wanted.plans:
        used = {one for plan in wanted.plans for one in plan.devices}
        yield ok("layout", f"{wanted.layout}: {len(wanted.plans)} instances on {len(used)} devices")
    if wanted.device == "cpu":
        return
    if not facts.devices:
        yield error(
            "devices",
            f"no {wanted.device} device: {facts.devices_note or 'none is listed'}",
            "nothing can be placed",
            "check the driver and, in a container, --device flags; or use --device cpu",
        )
    placed = {one for plan in wanted.plans for one in plan.devices}
    for device in facts.devices:
        yield from _device(device, used=not placed or device.index in placed)
    if wanted.device == "cuda":
        yield from _cuda(facts)


def _device(device: DeviceProperties, *, used: bool) -> Iterator[Finding]:
    name = f"device {device.index}"
    if device.free_bytes is None or not device.total_bytes:
        if used:
            fix = "npu-smi info, or nvidia-smi, tells more"
            yield warning(
                name, f"{device.name}: {device.note or 'memory unknown'}", "its memory cannot be planned", fix
            )
        return
    seen = f"{device.name}, {device.free_bytes / _GIB:.0f} of {device.total_bytes / _GIB:.0f} GiB free"
    users = ", ".join(f"{one.name or 'process'} ({one.pid})" for one in device.users)
    if used and (users or device.free_bytes < (1 - _TAKEN) * device.total_bytes):
        yield warning(
            name,
            seen + (f"; in use by {users}" if users else ""),
            "vLLM plans with the whole device: it will not start, or be short of memory",
            "end those processes, or leave the device out (ASCEND_RT_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES)",
        )
    else:
        yield ok(name, seen)


def _cuda(facts: Facts) -> Iterator[Finding]:
    if facts.driver_tool:
        yield ok("driver", f"NVIDIA driver {facts.driver_tool}")
    shared = any(plan.colocated_with for plan in facts.wanted.plans)
    exclusive = sorted({mode for mode in facts.compute_modes if mode.lower().startswith(("exclusive", "prohibited"))})
    if exclusive:
        why = "only one process may use such a GPU: stages that share one do not start"
        fix = "sudo nvidia-smi -c DEFAULT"
        finding = error if shared else warning
        yield finding("compute mode", ", ".join(exclusive), why, fix)
