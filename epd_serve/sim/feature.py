"""The bytes of a simulated feature: made from its key, so that whoever reads them can tell whose they are. Pure."""

from __future__ import annotations

import hashlib

DTYPE = "bfloat16"
_ITEM_BYTES = 2


def feature_bytes(key: str, nbytes: int) -> bytes:
    """`nbytes` of the feature of `key`."""
    digest = hashlib.blake2b(key.encode()).digest()
    return (digest * (-(-nbytes // len(digest))))[:nbytes]


def belongs_to(key: str, view: memoryview) -> bool:
    """Whether these are bytes of the feature of `key`: its beginning and its length say so."""
    digest = hashlib.blake2b(key.encode()).digest()
    return bytes(view[: len(digest)]) == digest[: len(view)] and len(view) > 0


def feature_shape(tokens: int, bytes_per_token: int) -> tuple[int, int]:
    """(tokens, hidden) of elements of `DTYPE`."""
    return tokens, max(1, bytes_per_token // _ITEM_BYTES)
