"""The garbage collector of a process that serves: what it holds for good is not looked at again and again.

Modules, classes and routes are some hundred thousand objects that never become garbage. A full collection that visits
them stops the event loop for 70 ms, which every request that is under way then waits.
"""

from __future__ import annotations

import gc

YOUNG = 10_000
"""Objects made, less those freed, until the young ones are looked through. A request makes a few hundred, hardly any of
them in a circle."""


def freeze_gc() -> None:
    """Exempts everything that is there by now from collection. Once, when a process has imported what it needs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
