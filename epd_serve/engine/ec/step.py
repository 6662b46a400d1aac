"""What travels from the scheduler side to the worker side of our EC connector, per step. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from store.arena import Lease


@dataclass(frozen=True)
class FeatureSlot:
    """Where a leased feature's bytes lie in the arena."""

    key: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    slot: int = 0

    @classmethod
    def of(cls, lease: Lease) -> FeatureSlot:
        meta = lease.meta
        return cls(meta.key, lease.offset, meta.nbytes, meta.shape, meta.dtype, slot=lease.slot)


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
