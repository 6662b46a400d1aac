"""The way a feature leaves an encoder past the host, where there is one. What the writer asks before it copies.

`NoDirectExit` stands where features go through the arena; `device_exit.py` has the one to device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch


class DirectExit(Protocol):
    """`put` belongs to the writer; the rest is thread-safe."""

    @property
    def path(self) -> str:
        """`device` while features can leave this way, else `host` (`StoreReport.feature_path`)."""

    @property
    def arena_needed(self) -> bool:
        """Whether some consumer needs the features in the arena, too."""

    def put(self, key: str, feature: torch.Tensor, written: Callable[[], None], *, again: bool) -> bool:
        """True: it left, and consumers that are reached this way can fetch it. False: not this way, for once or ever.

        Args:
            written: waits until the device has written the feature.
            again: replaces what is there.
        """

    def counters(self) -> Mapping[str, int]:
        """For the store report."""

    def close(self) -> None: ...


class NoDirectExit:
    """Everything goes through the arena."""

    path = "host"
    arena_needed = True

    def put(self, key: str, feature: torch.Tensor, written: Callable[[], None], *, again: bool) -> bool:
        return False

    def counters(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        """Nothing was opened."""
