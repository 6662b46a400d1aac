"""What is in the prefix cache of one stage, and what of it has still to be told. Pure, but for a lock.

Owns the bounds and the order of `CacheReport`s. Whose words these are is the stage's business: vLLM's events in real
ones (`epd_serve/engine/status/cache_events.py`), the scheduler's in simulated ones.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

from epd_serve.wire import CacheReport, PromptBlocks

HASHES_PER_REPORT = 16_384
"""128 KiB: far below what a subscriber takes at once."""

PROMPT_BYTES = 1 << 19
"""Of prompts that are told again to who asks for the whole, and of those that wait to be told."""

HASH_BYTES = 8


def short(digest: bytes) -> int:
    """A block's hash as it is told: 60 bits, which Python holds in half the memory of 64."""
    return int.from_bytes(digest[-HASH_BYTES:], "big") >> 4


def packed(hashes: Iterable[int]) -> bytes:
    """8 bytes each, little-endian."""
    numbers = array("Q", hashes)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpacked(raw: bytes) -> array[int]:
    """Raises ValueError: no whole number of hashes."""
    numbers = array("Q")
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class CacheLedger:
    """The cache of one life of one stage. Any thread.

    Args:
        block_tokens: of a block.
    """

    def __init__(self, instance: str, incarnation: str, block_tokens: int) -> None:
        self._instance, self._incarnation = instance, incarnation
        self.block_tokens = block_tokens
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._prompts: deque[PromptBlocks] = deque()
        self._prompt_bytes = 0
        self._untold: list[PromptBlocks] = []
        self._untold_bytes = 0
        self._whole = False
        self._seq = 0

    def is_now(self, number: int, held: bool) -> None:
        """This block is in the cache, or is not any more. Whoever repeats himself tells nobody anything."""
        with self._lock:
            if held is (number in self._held):
                return
            if held:
                self._held.add(number)
                self._stored.add(number)
                self._removed.discard(number)
            else:
                self._held.discard(number)
                self._stored.discard(number)
                self._removed.add(number)

    def cleared(self) -> None:
        """All blocks are gone."""
        with self._lock:
            for known in (self._held, self._stored, self._removed):
                known.clear()
            self._whole = self._seq > 0

    def prompt(self, nodes: bytes, hashes: Sequence[int], *, grown: bool = False) -> None:
        """These are the full blocks of a prompt. Of too many at once between two reports the later are not told."""
        one = PromptBlocks(nodes, packed(hashes), grown)
        size = len(one.nodes) + len(one.blocks)
        with self._lock:
            if self._untold_bytes + size > PROMPT_BYTES:
                return
            self._untold.append(one)
            self._untold_bytes += size
            self._prompts.append(one)
            self._prompt_bytes += size
            while self._prompt_bytes > PROMPT_BYTES:
                gone = self._prompts.popleft()
                self._prompt_bytes -= len(gone.nodes) + len(gone.blocks)

    def tell_whole(self) -> None:
        """Somebody knows nothing yet, or has missed something."""
        with self._lock:
            self._whole = self._seq > 0 or bool(self._held or self._prompts)

    def take(self) -> list[CacheReport]:
        """What there is to tell, in order."""
        with self._lock:
            if self._whole:
                self._removed.clear()
                return self._reports(sorted(self._held), (), list(self._prompts), whole=True)
            return self._reports(tuple(self._stored), tuple(self._removed), self._untold, whole=False)

    def _reports(
        self, stored: Sequence[int], removed: Sequence[int], prompts: list[PromptBlocks], *, whole: bool
    ) -> list[CacheReport]:
        self._stored, self._removed, self._untold, self._untold_bytes, self._whole = set(), set(), [], 0, False
        changes = max(len(stored), len(removed))
        reports = []
        for at in range(0, max(changes, int(whole)), HASHES_PER_REPORT):
            some = slice(at, at + HASHES_PER_REPORT)
            self._seq += 1
            reports.append(
                CacheReport(
                    self._instance,
                    self._incarnation,
                    self._seq,
                    self.block_tokens,
                    stored=packed(stored[some]),
                    removed=packed(removed[some]),
                    part="" if not whole else "more" if at else "first",
                )
            )
        if prompts:  # a report of their own: together they may be too large for one
            self._seq += 1
            reports.append(
                CacheReport(self._instance, self._incarnation, self._seq, self.block_tokens, prompts=prompts)
            )
        return reports
