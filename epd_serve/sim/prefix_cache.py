"""The KV blocks of a simulated stage and what of them can be used again: vLLM's block pool in miniature. Pure.

As harsh as vLLM's: only full blocks are found again, and only behind one another from the prompt's beginning; a block
in use is not evicted; of the others those go first that were let go of longest ago, of one sequence its last ones.
Two sequences that compute the same at once hold two copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import xxhash

from epd_serve.sim.prompts import Prompt
from epd_serve.sim.tokens import TOKEN_BYTES


class Block:
    """One KV block. key: its hash, once it is full and known; users: sequences that hold it."""

    __slots__ = ("key", "users")

    def __init__(self) -> None:
        self.key: int | None = None
        self.users = 1


class BlockPool:
    """
    Args:
        blocks: how many there are.

    Attributes:
        changed: called with a hash when it can be found from now on (True), or no more.
    """

    def __init__(self, blocks: int) -> None:
        self._untouched = blocks
        self._idle: OrderedDict[Block, None] = OrderedDict()  # the first one is taken next
        self._known: dict[int, dict[Block, None]] = {}
        self.changed: Callable[[int, bool], None] = lambda key, known: None

    @property
    def free(self) -> int:
        """Blocks that nobody holds, whatever is in them."""
        return self._untouched + len(self._idle)

    def find(self, keys: Sequence[int], most: int) -> list[Block]:
        """The blocks of the longest known beginning of a chain, `most` at most. Nobody holds them by this."""
        found = []
        for key in keys[:most]:
            if not (copies := self._known.get(key)):
                break
            found.append(next(iter(copies)))
        return found

    def reserve(self, found: Sequence[Block], more: int) -> list[Block] | None:
        """Hold `found` and so many others; None, and nothing held, where there are too few."""
        if more > self.free - sum(not block.users for block in found):
            return None
        for block in found:
            if not block.users:
                del self._idle[block]
            block.users += 1
        fresh = min(more, self._untouched)
        self._untouched -= fresh
        return [*found, *[Block() for _ in range(fresh)], *[self._take() for _ in range(more - fresh)]]

    def release(self, blocks: Sequence[Block]) -> None:
        """One who held these does no more."""
        for block in reversed(blocks):
            block.users -= 1
            if block.users:
                continue
            if self._known:
                self._idle[block] = None
            else:
                self._untouched += 1  # nobody can find anything in any of them

    def name(self, block: Block, key: int) -> None:
        """It is full, and this is its hash."""
        if block.key is None:
            block.key = key
            copies = self._known.setdefault(key, {})
            copies[block] = None
            if len(copies) == 1:
                self.changed(key, True)

    def _take(self) -> Block:
        """The idle one that was let go of longest ago."""
        block, _ = self._idle.popitem(last=False)
        if block.key is not None:
            copies = self._known[block.key]
            del copies[block]
            if not copies:
                del self._known[block.key]
                self.changed(block.key, False)
        block.key, block.users = None, 1
        return block


def block_keys(prompt: Prompt, block_tokens: int, *, salt: str, answer: str = "") -> list[int]:
    """Hashes of the full blocks of a prompt, and of what was generated after it: each of all up to its end."""
    content = bytearray()
    at = 0
    for item, place in zip(prompt.items, prompt.places, strict=True):
        content += prompt.text[at:place] + xxhash.xxh3_64_digest(item.key.encode())[:TOKEN_BYTES] * item.tokens
        at = place
    content += prompt.text[at:] + answer.encode()
    size = block_tokens * TOKEN_BYTES
    digest = xxhash.xxh3_64(salt.encode())
    keys = []
    for start in range(0, len(content) - size + 1, size):
        digest.update(bytes(content[start : start + size]))
        keys.append(digest.intdigest() >> 4)
    return keys
