"""Random streams that names fix: what a draw is for, never what was drawn before it. Pure.

Request 400 of a workload is the same whether 401 or 4000 are made, and a knob that changes one thing leaves the rest:
each draw has a stream of its own, NumPy's PCG64 seeded by the digest of its names. NumPy keeps the bits of PCG64 and of
`Generator.random` from version to version, and may change the samplers made of them: a test pins numbers of each.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np

BLOCK = 32
"""Of quantiles in a row that cover (0, 1) evenly."""


def seeded_rng(*names: str | int) -> np.random.Generator:
    """Returns the stream that `names` name."""
    digest = hashlib.sha256("\x1f".join(map(str, names)).encode()).digest()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest))))


def spread_quantile(index: int, *names: str | int) -> float:
    """Returns the index-th of a series of quantiles in (0, 1) of which every `BLOCK` in a row cover the range evenly.

    One falls in each 1/32 of the range, in random order (stratified sampling). So a sample of some hundred requests has
    the mean that a profile states and not one some per cent beside it, as independent draws would give; the values are
    distributed as before, only a run of nothing but large ones is less likely.
    """
    block, place = divmod(index, BLOCK)
    order, within = _strata(block, *names)
    return float(order[place] + within[place]) / BLOCK


@lru_cache(maxsize=64)
def _strata(block: int, *names: str | int) -> tuple[Any, Any]:
    """Which part of the range each of the block's quantiles falls in, and where within it. [BLOCK] each"""
    rng = seeded_rng(*names, "strata", block)
    return rng.permutation(BLOCK), 1 - rng.random(BLOCK) * (1 - 1e-12)  # neither end of the range
