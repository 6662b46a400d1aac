"""One feature as a consumer sees it: its state, who needs it, and the pin that holds it. Values; no transitions."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from store.arena import Lease


class FeatureState(enum.Enum):
    WANTED = "wanted"
    DOUBTED = "doubted"
    READY = "ready"
    LOST = "lost"


UNSETTLED = (FeatureState.WANTED, FeatureState.DOUBTED)


@dataclass
class Item:
    state: FeatureState
    born: float
    deadline: float  # WANTED, DOUBTED: when to go on without it. READY without requests: when to let go.
    cause: str = "deadline"  # why it is lost, or will be at the deadline
    pin: Lease | None = None
    missed: bool = False  # looked for where it would be at once, and it was not there
    requests: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)  # of `requests`: those that know it as LOST
    decided: set[str] = field(default_factory=set)  # of `told`: those that recompute it

    @property
    def open(self) -> bool:
        """Whether the feature is of use to somebody if it comes now."""
        return self.state in UNSETTLED or (self.state is FeatureState.LOST and self.requests != self.decided)
