"""What travels from the scheduler side to the worker side of our EC connector, per step. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epd_serve.engine.ec.device_ledger import DevicePin
from epd_serve.engine.ec.feature_source import Held


@dataclass(frozen=True)
class FeatureSlot:
    """Where a pinned feature's bytes lie: in a slot of the arena, or (`on_device`) in the slab of every worker."""

    key: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    on_device: bool = False
    slot: int = 0

    @classmethod
    def of(cls, held: Held) -> FeatureSlot:
        if isinstance(held, DevicePin):
            return cls(held.key, held.offset, held.nbytes, held.shape, held.dtype, on_device=True)
        meta = held.meta
        return cls(meta.key, held.offset, meta.nbytes, meta.shape, meta.dtype, slot=held.slot)


@dataclass(frozen=True)
class NeededItem:
    """An item of a request that reached an encoder. `again`: its consumer could not get what was announced."""

    key: str
    metadata: dict[str, Any] = field(default_factory=dict)
    again: bool = False


@dataclass
class FeatureStep:
    """One step.

    Attributes:
        loads: features that this step's requests load instead of encoding them.
        needed: (encoder) items of requests that are seen for the first time.
        held: (encoder) keys of all requests that are queued or running.
        ended: (encoder) keys of requests that ended, served.
    """

    loads: list[FeatureSlot] = field(default_factory=list)
    needed: list[NeededItem] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
