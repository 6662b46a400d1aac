"""`--core-share`: which fraction of its device's cores each co-located instance gets. Pure.

`E=0.3,P=0.7` names roles or instances (`E0=0.3`), `auto` decides by the model, "" sets no limits: the hardware shares
as it likes, which is what EPD-Serve measures (§3.5, Fig. 6). Who enforces a share is `npu_ops/core_limits.py`'s table.

`auto`, for the instances of one device: encode and prefill compute, so they divide the cores by their FLOP on the
reference request (`epd_serve/stage_work.py`), equally when the model's are unknown. Decode waits for memory: it gets
`DECODE_SHARE`, with which it still takes all the bandwidth there is, or less where several decode beside something that
computes. A fused instance gets the parts of all its stages.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from epd_serve.errors import ConfigError
from epd_serve.placement import InstancePlan
from epd_serve.stage_work import StageWork

FLAG = "--core-share"
AUTO = "auto"

DECODE_SHARE = 0.3
"""Cores that saturate the device's memory. On NVIDIA GPUs an SM reads at most 64 bytes a clock: of an H200's 132 SMs at
1.98 GHz, 38 read 4.8 TB/s (data sheet), which is 0.29. Nothing comparable is published of an NPU; taken over. A step of
decode is bound by memory up to a batch of some hundred (peak FLOP by bandwidth: 206 per byte on an H200)."""

DECODE_LIMIT = 0.5
"""All decoding instances beside others that compute: below half, the prompt would be what everybody waits for."""

LEAST_SHARE = 0.1
"""What `auto` gives at least: with less, one large picture holds up its neighbour's next step for a second."""

_EVEN = StageWork(1.0, 1.0, 1.0)


def parse_core_shares(text: str) -> Mapping[str, float] | None:
    """Shares by role or instance, empty for "", None for `auto`.

    Raises:
        ConfigError: not NAME=SHARE, a name twice, a share that is no number above 0 and at most 1.
    """
    if text.strip() == AUTO:
        return None
    shares: dict[str, float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not (name and equals):
            raise _refusal(f"{entry!r} is not NAME=SHARE; for example E=0.3,P=0.7, or auto")
        if name in shares:
            raise _refusal(f"{name} is given twice")
        shares[name] = checked_share(value, name)
    return shares


def checked_share(text: str, whose: str) -> float:
    """A share as a number. Raises ConfigError."""
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise _refusal(
            f"{whose} gets {text or 'nothing'}; a share is a fraction of a device's cores, above 0, at most 1"
        )
    return share


def share_cores(text: str, plans: Sequence[InstancePlan], work: StageWork | None = None) -> tuple[InstancePlan, ...]:
    """The plans with `core_share` set where the option says so. `work`: of the model, where that is known.

    An instance's name goes before its role's. Of co-located instances that are not named the rest is for, in equal
    parts. A role's share goes to its instances that share a device: one that has a device to itself has all of it.

    Raises:
        ConfigError: names nobody, or nobody who shares a device; more than a device has.
    """
    named = parse_core_shares(text)
    if named is not None:
        _check_names(named, plans)
    shares: dict[str, float] = {}
    for device in dict.fromkeys(plan.devices for plan in plans if plan.colocated_with):
        together = [plan for plan in plans if plan.devices == device]
        shares.update(_automatic(together, work or _EVEN) if named is None else _given(together, named))
    return tuple(replace(plan, core_share=shares.get(plan.id)) for plan in plans)


def neighbours_shares(plan: InstancePlan, plans: Sequence[InstancePlan]) -> dict[str, float]:
    """Shares of all instances on the devices of `plan`, itself included, in layout order; empty without limits."""
    together = [other for other in plans if other.devices == plan.devices]
    return {other.id: other.core_share for other in together if other.core_share is not None}


def _check_names(named: Mapping[str, float], plans: Sequence[InstancePlan]) -> None:
    known = list(dict.fromkeys([*(plan.role.value for plan in plans), *(plan.id for plan in plans)]))
    for name in named:
        meant = [plan for plan in plans if name in (plan.id, plan.role.value)]
        if not meant:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise _refusal(f"the layout has no {name}; {hint}")
        if not any(plan.colocated_with for plan in meant):
            raise _refusal(
                f"{name} shares its device with nobody, so cores it leaves would stand idle; leave {name} out, or "
                "put stages together, for example (E-P)-D"
            )


def _given(together: Sequence[InstancePlan], named: Mapping[str, float]) -> dict[str, float]:
    # The instance's own name comes last and wins.
    shares = {plan.id: named[name] for plan in together for name in (plan.role.value, plan.id) if name in named}
    if not shares:
        return {}
    total, others = sum(shares.values()), [plan.id for plan in together if plan.id not in shares]
    given = " + ".join(f"{name} {share:g}" for name, share in shares.items())
    if total > 1 + 1e-9:
        raise _refusal(f"{given} is {total:g} of one device; together they can have at most 1")
    if others and total > 1 - 1e-9:
        raise _refusal(f"{given} leaves nothing for {', '.join(others)} on the same device; give less")
    shares.update({name: (1 - total) / len(others) for name in others})
    return {plan.id: shares[plan.id] for plan in together}


def _automatic(together: Sequence[InstancePlan], work: StageWork) -> dict[str, float]:
    encoding = work.encode / max(1, sum(plan.role.encodes for plan in together))  # those of a kind take turns
    prefilling = work.prefill / max(1, sum(plan.role.prefills for plan in together))
    computes = {plan.id: encoding * plan.role.encodes + prefilling * plan.role.prefills for plan in together}
    decoding = sum(plan.role.decodes for plan in together)
    total = sum(computes.values())
    if not total:
        return {plan.id: 1 / len(together) for plan in together}
    decode = min(DECODE_SHARE, DECODE_LIMIT / decoding) if decoding else 0.0
    left = 1 - decode * decoding
    wanted = {plan.id: decode * plan.role.decodes + left * computes[plan.id] / total for plan in together}
    return _lifted(wanted, min(LEAST_SHARE, 1 / len(together)))


def _lifted(shares: Mapping[str, float], least: float) -> dict[str, float]:
    """The same sum, nobody below `least`: what the small gain the others lose, in proportion to their excess."""
    missing = sum(max(0.0, least - share) for share in shares.values())
    excess = sum(max(0.0, share - least) for share in shares.values())
    kept = 1 - missing / excess if excess else 0.0
    return {name: least + max(0.0, share - least) * kept for name, share in shares.items()}


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"{FLAG}: {reason}", param=FLAG)
