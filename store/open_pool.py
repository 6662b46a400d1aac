"""Opens the MM Store of a stage: its host's arena, and the second tier if the deployment has one."""

from __future__ import annotations

from store.arena import Arena
from store.feature_pool import FeaturePool
from store.mooncake_client import MooncakeConfig
from store.mooncake_store import MooncakeStore


def open_pool(*, arena: str, mooncake: MooncakeConfig | None = None) -> FeaturePool:
    """Attaches the arena at once and connects to the second tier in the background, so its absence delays no start.

    Without `mooncake` nothing of it is imported.

    Raises:
        StoreError: there is no such arena, or Mooncake is wanted and not installed.
    """
    attached = Arena.attach(arena)
    if mooncake is None:
        return FeaturePool(attached)
    try:
        return FeaturePool(attached, MooncakeStore(mooncake))
    except BaseException:
        attached.close()
        raise
