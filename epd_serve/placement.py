"""From a layout to instances on devices: what can serve, and who runs where. Pure.

Owns the refusals that need meaning rather than grammar, and `InstancePlan`. Ports, addresses, core sets and shares of
memory are the launcher's; vLLM flags are `epd_serve/engine/argv.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from epd_serve.errors import ConfigError, LayoutError
from epd_serve.layout import Group, Layout, Member
from epd_serve.layout_parser import parse
from epd_serve.roles import Role


@dataclass(frozen=True)
class InstancePlan:
    """One instance of a lowered layout.

    Attributes:
        id: role and number within the role: `E0`, `P0`, `PD1`.
        tp: tensor-parallel width, `len(devices)`.
        devices: device ids in rank order.
        colocated_with: ids of the other instances on the same devices.
        memory_share: share of each device's memory, or None for the engine's default (`epd_serve.memory_shares`).
        kv_cache_bytes: of each device's memory for its KV cache, or None where the engine finds out itself.
        core_share: share of each device's compute cores, or None for no limit (`epd_serve.core_shares`).
        both: a P or D that can take the other's part, too (`switchable`).
    """

    id: str
    role: Role
    tp: int
    devices: tuple[int, ...]
    colocated_with: tuple[str, ...] = ()
    memory_share: float | None = None
    core_share: float | None = None
    kv_cache_bytes: int | None = None
    both: bool = False

    @property
    def sends_kv(self) -> bool:
        """In the part it has, or in the other one."""
        return self.role.sends_kv or self.both

    @property
    def takes_kv(self) -> bool:
        return self.role.takes_kv or self.both


def check_servable(layout: Layout) -> None:
    """Refuse a layout in which some instance could never do its work.

    An instance that prefills without decoding needs a D to hand its KV to, a D needs one that does, an E needs a P or
    PD to hand its features to. A layout without E serves pictures with the vision tower of its P or PD. Tensor-parallel
    sizes may differ: KV finds its ranks by heads (`epd_serve.kv.heads`).

    Raises:
        LayoutError: caret under the instance at fault.
    """
    if not layout.spec:
        layout = parse(str(layout))
    roles = layout.roles
    for member in layout.members():
        reason = _misfit(member.role, roles)
        if reason is not None:
            raise LayoutError(reason, layout.spec, member.position)


def _misfit(role: Role, roles: frozenset[Role]) -> str | None:
    if role is Role.ED:
        return "ED has no encode-only path inside one vLLM instance; co-locate two processes instead: (E-D)-P"
    if role.sends_kv and Role.D not in roles:
        return f"{role.value} prefills, but there is no D to decode; add one, or fuse them into {role.value}D"
    if role.takes_kv and not any(other.sends_kv for other in roles):
        return "D decodes, but there is no P or EP to prefill for it; add one, or fuse them into PD"
    if role.sends_features and not roles & {Role.P, Role.PD}:
        return "E encodes, but there is no P or PD to prefill with its features; for example E-PD or (E-P)-D"
    return None


def lower(layout: Layout, device_ids: Sequence[int], *, shared: bool = False) -> tuple[InstancePlan, ...]:
    """Place the instances on devices in the layout's order; co-located members share the same ones.

    Args:
        shared: where there are too few devices, those that there are stand for several each, in turn: the layout's
            devices are virtual, and who meets on one shares its memory and cores as members of a group do.

    Raises:
        ConfigError: fewer devices than the layout needs; ranks of one instance would share a device.
    """
    virtual = shared and 0 < len(device_ids) < layout.device_count
    if virtual:
        if any(member.tp > 1 for member in layout.members()):
            raise ConfigError(
                f"layout {layout} has tensor-parallel ranks, which need a device each: found {len(device_ids)} of "
                f"{layout.device_count}; drop --share-devices, or tp",
                param="--share-devices",
            )
        device_ids = tuple(islice(cycle(device_ids), layout.device_count))
    if len(device_ids) < layout.device_count:
        ids = ", ".join(map(str, device_ids)) or "none"
        raise ConfigError(
            f"layout {layout} needs {_devices(layout.device_count)}, found {len(device_ids)}: {ids}; "
            "put stages together, for example (E-P-D) or EPD, make more devices visible, or try it on fewer with "
            "--share-devices",
            param="--layout",
        )
    numbers: Counter[Role] = Counter()
    plans: list[InstancePlan] = []
    free = iter(device_ids)
    for group in layout.groups:
        for _ in range(group.repeat):
            devices = tuple(next(free) for _ in range(group.tp))
            plans.extend(_place(group, devices, numbers))
    return tuple(_with_neighbours(plan, plans) for plan in plans) if virtual else tuple(plans)


def switchable(plans: Sequence[InstancePlan]) -> tuple[InstancePlan, ...]:
    """With both halves of the KV connector where one is P or D. Fused roles keep theirs."""
    return tuple(replace(plan, both=plan.role in (Role.P, Role.D)) for plan in plans)


def _with_neighbours(plan: InstancePlan, plans: Sequence[InstancePlan]) -> InstancePlan:
    """Who really is on its device, of whichever group of the layout."""
    others = (other.id for other in plans if other.devices == plan.devices and other.id != plan.id)
    return replace(plan, colocated_with=tuple(others))


def _place(group: Group, devices: tuple[int, ...], numbers: Counter[Role]) -> list[InstancePlan]:
    named: list[tuple[str, Member]] = []
    for member in group.members:
        for _ in range(member.count):
            named.append((f"{member.role.value}{numbers[member.role]}", member))
            numbers[member.role] += 1
    return [
        InstancePlan(
            id=name,
            role=member.role,
            tp=member.tp,
            devices=devices,
            colocated_with=tuple(other for other, _ in named if other != name),
        )
        for name, member in named
    ]


def _devices(count: int) -> str:
    return f"{count} device{'s' if count != 1 else ''}"
