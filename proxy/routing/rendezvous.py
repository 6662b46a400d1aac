"""Owners of keys by highest random weight: everybody who knows the names agrees on them, without asking anybody. Pure.

Equal work meets at its owner, which is what makes the single flight of several proxies one flight and a
prompt find the prefix cache that its last turn filled. How much load an owner may have is its user's business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def owners(key: str, ids: Sequence[str]) -> tuple[int, ...]:
    """Indices of `ids`, the owner of `key` first, then those who inherit it (highest random weight).

    Depends on nothing but the names: every proxy agrees, a restart changes nothing, and when one of `ids` is gone only
    its keys move.
    """
    weights = [hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=16).digest() for name in ids]
    return tuple(sorted(range(len(ids)), key=weights.__getitem__, reverse=True))
