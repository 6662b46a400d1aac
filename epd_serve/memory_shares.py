"""Who gets how much of one device: what instances must have, and the KV cache that the rest becomes. Pure.

Owns the division and what is missing where it does not fit. What an instance must have is worked out by
`epd_serve.stage_memory`; what the operator is told, and may change, is `deploy/memory/plan.py`'s.

How vLLM and vllm-ascend (0.23 to 0.32) take the numbers: `--gpu-memory-utilization` is a fraction of the device's
*whole* memory for *this* instance. It has to be free at the start, or the engine ends; weights, activations and KV
cache then have to fit into it, while the runtime's context, its graphs and, on CUDA, the communicators lie outside. An
instance alone is profiled, and what profiling leaves is its KV cache. Profiling measures the device, not the process: a
neighbour that allocates in the meantime is taken off this KV cache, and one that frees something ends the start ("Error
in memory profiling"). Neighbours that serve do both, for instance while a dead one restarts. So co-located instances
are told their KV cache in bytes (`--kv-cache-memory-bytes`), which skips that arithmetic; the utilization beside it
remains the check at the start. An encode-only instance has no KV cache and is never profiled: it takes what it needs
whatever its utilization, which therefore is only that check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd_serve.roles import Role

ENGINE_DEFAULT_SHARE = 0.92
"""`gpu_memory_utilization` of an instance that is not told one (vLLM 0.23 and 0.32)."""

RESERVE = 0.04
"""Share of a co-located device that nobody plans with: what estimates miss, and room for the runtime itself."""

LEAST_SHARE = 0.001

# What is left for KV caches is divided by these. Where prefill hands its KV away, it holds a prompt for a moment.
_KV_PARTS = {Role.E: 0, Role.P: 1, Role.EP: 1}
_KV_PARTS_OF_DECODE = 2


@dataclass(frozen=True)
class Need:
    """What one instance must have on each of its devices, in bytes.

    Attributes:
        weights, activations: inside the engine's own budget.
        longest: activations of the longest clip beyond that, for an encode-only instance, which nobody profiles.
        runtime: outside of it: context, graphs, communicators, buffers of ours.
        kv_token: KV cache of one token; 0 without a KV cache.
        kv_least: KV cache without which the engine does not start: one request of the longest length.
        fixed_share: utilization that the operator has set, or None.
        fixed_kv: KV cache that the operator has set, or None.
    """

    id: str
    role: Role
    weights: int
    activations: int
    runtime: int
    longest: int = 0
    kv_token: int = 0
    kv_least: int = 0
    fixed_share: float | None = None
    fixed_kv: int | None = None

    @property
    def without_kv(self) -> int:
        return self.weights + self.activations + self.runtime

    @property
    def least(self) -> int:
        return self.without_kv + (self.kv_least if self.fixed_kv is None else self.fixed_kv)


@dataclass(frozen=True)
class Grant:
    """What one instance gets on each of its devices.

    Attributes:
        share: utilization, of the whole device; None: the engine's default, its own.
        longest: of `Need.longest`, what there is room for.
        kv: bytes of KV cache as planned. kv_override: what the engine is given of it, None where it measures itself.
    """

    need: Need
    share: float | None
    kv: int
    kv_override: int | None
    longest: int = 0

    @property
    def tokens(self) -> int:
        return self.kv // self.need.kv_token if self.need.kv_token else 0

    @property
    def taken(self) -> int:
        """Bytes of the device, all together."""
        return self.need.without_kv + self.longest + self.kv


@dataclass(frozen=True)
class Division:
    """One device, divided.

    Attributes:
        total, free: bytes of it, and those that can be had now.
        missing: bytes by which the least that the instances must have exceeds what there is; 0 where all fit.
    """

    total: int
    free: int
    grants: tuple[Grant, ...]
    missing: int

    @property
    def taken(self) -> int:
        return sum(grant.taken for grant in self.grants)


def divide(total: int, needs: Sequence[Need], free: int | None = None) -> Division:
    """Divide a device of `total` bytes, of which `free` can be had now (None: all).

    An instance alone keeps the engine's default, or what is free where that is less. Neighbours share what is free but
    for the reserve: first all have what they must have, then encoders get up to half of the rest for the longest clips,
    then comes KV cache. Where nothing is missing and the operator sets no share, shares of neighbours sum below 1.
    """
    assert total > 0 and needs
    free = total if free is None else max(0, min(free, total))
    if len(needs) == 1:
        return _alone(total, free, needs[0])
    usable = max(0, free - int(total * RESERVE))
    fixed = {need.id: _fixed_kv(total, need) for need in needs}
    least = {need.id: need.without_kv + (need.kv_least if (own := fixed[need.id]) is None else own) for need in needs}
    rest = usable - sum(least.values())
    longest = _longest(needs, max(0, rest))
    room = max(0, rest) - sum(longest.values())
    parts = {need.id: _kv_parts(need) if fixed[need.id] is None else 0 for need in needs}
    whole = sum(parts.values())
    grants = []
    for need in needs:
        own = fixed[need.id]
        more = room * parts[need.id] // whole if parts[need.id] else 0
        kv = own if own is not None else need.kv_least + more
        share = need.fixed_share
        if share is None:
            share = _share(need.weights + need.activations + longest[need.id] + kv, total, len(needs))
        grants.append(Grant(need, share, kv, kv if own is None and need.kv_token else None, longest[need.id]))
    return Division(total, free, tuple(grants), max(0, -rest))


def fixed_shares(roles: Sequence[Role]) -> tuple[float | None, ...]:
    """Shares where a model's sizes are unknown: encoders a tenth, less when crowded, the rest among language models."""
    if len(roles) == 1:
        return (None,)
    encoders = sum(role is Role.E for role in roles)
    models = len(roles) - encoders
    encoder = min(0.1, 0.9 / (2 * len(roles)))
    model = (0.9 - encoders * encoder) / models if models else 0.0
    return tuple(round(encoder if role is Role.E else model, 4) for role in roles)


def _alone(total: int, free: int, need: Need) -> Division:
    share = need.fixed_share
    if need.kv_token and share is None and total * ENGINE_DEFAULT_SHARE > free:
        share = _share(max(0, free - int(total * RESERVE) - need.runtime), total, 1)
    budget = int(total * (share if share is not None else ENGINE_DEFAULT_SHARE))
    inside = need.weights + need.activations
    kv = need.fixed_kv if need.fixed_kv is not None else max(0, budget - inside) if need.kv_token else 0
    within = inside + need.kv_least - budget if need.kv_token and need.fixed_kv is None else 0
    longest = max(0, min(need.longest, free - need.least))
    return Division(total, free, (Grant(need, share, kv, None, longest),), max(0, within, need.least - free))


def _longest(needs: Sequence[Need], rest: int) -> dict[str, int]:
    """Room for the longest clips: all of it, or half of the rest (all where nobody has KV) in proportion."""
    wanted = sum(need.longest for need in needs)
    given = min(wanted, rest // 2 if any(need.kv_token for need in needs) else rest)
    return {need.id: given * need.longest // wanted if wanted else 0 for need in needs}


def _kv_parts(need: Need) -> int:
    return _KV_PARTS.get(need.role, _KV_PARTS_OF_DECODE) if need.kv_token else 0


def _fixed_kv(total: int, need: Need) -> int | None:
    """The KV cache that follows from what the operator has set; None where nothing is."""
    if need.fixed_kv is not None:
        return need.fixed_kv
    if need.fixed_share is not None and need.kv_token:
        return max(0, int(total * need.fixed_share) - need.weights - need.activations)
    return None


def _share(inside: int, total: int, neighbours: int) -> float:
    """Rounded down to four digits, so that sums stay below one; never zero, which no engine takes."""
    return max(min(LEAST_SHARE, RESERVE / (2 * neighbours)), min(0.99, inside * 10_000 // total / 10_000))
