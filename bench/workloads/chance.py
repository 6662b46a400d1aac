"""Random draws that are the same on every machine and Python for the same names. Pure.

Python promises this of `Random.random()` only, so the distributions are derived here, from the bits of SHA-256 streams.
A draw is fixed by its names (workload, seed, what it is for, number of the request), never by what was drawn before:
request 400 of a workload is the same whether 401 or 4000 are made, and a knob that changes one thing leaves the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

_WORD_BYTES = 7  # 56 bits, of which a double keeps 53
_BLOCK_WORDS = 4  # of one digest


class Chance:
    """A stream of draws named by `names` (text and whole numbers)."""

    def __init__(self, *names: str | int) -> None:
        self._name = "\x1f".join(str(name) for name in names).encode()
        self._words: list[int] = []
        self._block = 0

    def uniform(self) -> float:
        """In (0, 1), both ends excluded."""
        if not self._words:
            digest = hashlib.sha256(self._name + b"\x1e%d" % self._block).digest()
            self._block += 1
            starts = range(0, _BLOCK_WORDS * _WORD_BYTES, _WORD_BYTES)
            self._words = [int.from_bytes(digest[at : at + _WORD_BYTES]) for at in reversed(starts)]
        return ((self._words.pop() >> 4) + 0.5) / (1 << 52)

    def below(self, limit: int) -> int:
        """0 to limit - 1, each as likely."""
        assert limit > 0
        return int(self.uniform() * limit)

    def normal(self) -> float:
        """Mean 0, deviation 1."""
        return normal_at(self.uniform())

    def exponential(self) -> float:
        """Mean 1."""
        return -math.log(self.uniform())

    def gamma(self, shape: float) -> float:
        """Mean `shape`, scale 1 (Marsaglia and Tsang, "A Simple Method for Generating Gamma Variables", 2000)."""
        assert shape > 0
        if shape < 1:
            return self.gamma(shape + 1) * math.pow(self.uniform(), 1 / shape)
        depth = shape - 1 / 3
        width = 1 / math.sqrt(9 * depth)
        while True:
            at = self.normal()
            volume = (1 + width * at) ** 3
            if volume > 0 and math.log(self.uniform()) < at * at / 2 + depth * (1 - volume + math.log(volume)):
                return depth * volume

    def shuffled(self, count: int) -> Sequence[int]:
        """The numbers 0 to count - 1 in random order."""
        order = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order


def normal_at(quantile: float) -> float:
    """The standard normal's value at `quantile`, which is in (0, 1)."""
    return NormalDist().inv_cdf(quantile)


BLOCK = 32


def spread_quantile(index: int, *names: str | int) -> float:
    """The index-th of a series of quantiles in (0, 1) of which every `BLOCK` in a row cover the range evenly.

    One falls in each 1/32 of the range, in random order (stratified sampling). So a sample of some hundred requests has
    the mean that a profile states and not one some per cent beside it, as independent draws would give; the values are
    distributed as before, only a run of nothing but large ones is less likely.
    """
    block, place = divmod(index, BLOCK)
    return (_strata(block, *names)[place] + Chance(*names, "within", index).uniform()) / BLOCK


@lru_cache(maxsize=64)
def _strata(block: int, *names: str | int) -> Sequence[int]:
    return Chance(*names, "strata", block).shuffled(BLOCK)
