"""What is cached where: which instance holds which KV blocks, and of which blocks known prompts are made.

Fed by what the stages say (`CacheReport`), asked for each prompt before it is routed. A hint, never the truth: blocks
are gone when they are gone. Lives in the event loop, as the status table does. Bounded: blocks beyond `max_blocks` in
all are not noted, prompts beyond `max_prompt_blocks` push out the oldest.

vLLM drops a chain of blocks from its end, so what an instance holds of a prompt is a beginning, found by bisection.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from epd_serve.cache_ledger import unpacked
from epd_serve.instances import IncarnationId
from epd_serve.wire import CacheReport, PromptBlocks

ASK_AGAIN_S = 1.0
"""How long an instance that was asked for the whole of its cache has to tell it."""


class Known(Struct, frozen=True):
    """What is known of one prompt.

    Attributes:
        node: index of the last of its nodes whose blocks are known; -1 for none.
        tokens: those of that beginning.
        held: tokens of it that each instance has cached, where it has any.
    """

    node: int = -1
    tokens: int = 0
    held: Mapping[IncarnationId, int] = {}


NOTHING = Known()


MAX_NODES = 131_072
"""Places in known prompts, all together; each takes about 200 bytes."""


@dataclass
class _Cache:
    """What one life of an instance holds. seq: of its last report; asked_at: when it was asked for the whole."""

    incarnation: str
    block_tokens: int
    blocks: set[int] = field(default_factory=set)
    seq: int = 0
    asked_at: float = float("-inf")


class _Chain:
    """The blocks of the latest prompt that passes through its nodes: last one first, so that along them those that an
    instance lacks come before those that it holds, which is the order that `bisect` can search without our help."""

    __slots__ = ("backwards", "block_tokens")

    def __init__(self, blocks: array[int], block_tokens: int) -> None:
        self.backwards = blocks[::-1]
        self.block_tokens = block_tokens


@dataclass(slots=True)
class _Node:
    """A place in prompts. count: blocks that lie before it; -1 while only one prompt through it is known, so that
    nobody knows where in its chain the place is. grown: with the answer that followed; 0 while that is not known."""

    chain: _Chain
    count: int
    grown: int = 0


class PrefixIndex:
    """One per front door.

    Args:
        max_blocks: noted in all, of all instances.
        max_prompt_blocks: of known prompts; each takes 8 bytes.
    """

    def __init__(
        self,
        *,
        max_blocks: int = 1_000_000,
        max_prompt_blocks: int = 4_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_blocks, self._max_prompt_blocks = max_blocks, max_prompt_blocks
        self._clock = clock
        self._caches: dict[str, _Cache] = {}
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        self._chains: OrderedDict[int, _Chain] = OrderedDict()  # by the last node of their prompt, oldest first
        self._prompt_blocks = 0
        self.unnoted = 0

    # --- what the stages say ----------------------------------------------------------------------------------------

    def report(self, report: CacheReport) -> bool:
        """Take in what an instance says. Whether it has to be asked for the whole (`wire.WHOLE_TOPIC`): something it
        said was not heard. Raises ValueError: what it says makes no sense."""
        cache = self._caches.get(report.instance)
        if cache is None or cache.incarnation != report.incarnation or cache.block_tokens != report.block_tokens:
            if report.block_tokens <= 0:
                raise ValueError(f"{report.instance} has blocks of {report.block_tokens} tokens")
            cache = self._caches[report.instance] = _Cache(report.incarnation, report.block_tokens)
        stored, removed = unpacked(report.stored), unpacked(report.removed)
        ask = False
        if report.part == "first":
            cache.blocks, cache.asked_at = set(), float("-inf")
        elif report.seq != cache.seq + 1 and self._clock() >= cache.asked_at + ASK_AGAIN_S:
            cache.asked_at, ask = self._clock(), True
        cache.seq = report.seq
        cache.blocks.difference_update(removed)
        room = self._max_blocks - self.blocks
        self.unnoted += max(0, len(stored) - room)
        cache.blocks.update(stored[: max(room, 0)])
        for prompt in report.prompts:
            self._learn(prompt, report.block_tokens)
        return ask

    def forget(self, incarnation_id: IncarnationId) -> None:
        """This life of an instance is over."""
        cache = self._caches.get(incarnation_id[0])
        if cache is not None and cache.incarnation == incarnation_id[1]:
            del self._caches[incarnation_id[0]]

    @property
    def blocks(self) -> int:
        """Noted in all."""
        return sum(len(cache.blocks) for cache in self._caches.values())

    def held_by(self, incarnation_id: IncarnationId) -> int | None:
        """Tokens that an instance has cached; None of one that has said nothing."""
        cache = self._caches.get(incarnation_id[0])
        if cache is None or cache.incarnation != incarnation_id[1]:
            return None
        return len(cache.blocks) * cache.block_tokens

    # --- what requests ask ------------------------------------------------------------------------------------------

    def known(self, nodes: Sequence[int]) -> Known:
        """What is known of a prompt with these nodes."""
        for at in range(len(nodes) - 1, -1, -1):
            node = self._nodes.get(nodes[at])
            if node is None or node.count < 0 or node.count > len(node.chain.backwards):
                continue
            self._nodes.move_to_end(nodes[at])
            count = max(node.count, min(node.grown, len(node.chain.backwards))) if at + 1 < len(nodes) else node.count
            chain = node.chain
            held = {
                (name, cache.incarnation): found * chain.block_tokens
                for name, cache in self._caches.items()
                if cache.block_tokens == chain.block_tokens and (found := _held(chain, count, cache.blocks))
            }
            return Known(at, count * chain.block_tokens, held)
        return NOTHING

    # --- inside -----------------------------------------------------------------------------------------------------

    def _learn(self, prompt: PromptBlocks, block_tokens: int) -> None:
        """Raises ValueError: it makes no sense."""
        nodes, blocks = unpacked(prompt.nodes), unpacked(prompt.blocks)
        if not nodes:
            return
        chain = _Chain(blocks, block_tokens)
        last = nodes[-1]
        if prompt.grown:
            node = self._nodes.get(last)
            if node is not None and node.count >= 0 and _shared(node.chain, chain) >= node.count:
                node.chain, node.grown = chain, len(blocks)
                self._add_chain(last, chain)
            return
        deepest = True
        for number in reversed(nodes):
            node = self._nodes.get(number)
            if number == last:
                grown = node.grown if node is not None else 0
                if node is not None and grown > len(blocks) and _shared(node.chain, chain) == len(blocks):
                    chain = node.chain  # the same prompt once more: what followed it is known
                else:
                    grown = 0
                self._nodes[number] = _Node(chain, len(blocks), grown)
                deepest = node is None
            elif node is None or node.chain.block_tokens != block_tokens:
                self._nodes[number] = _Node(chain, -1)
            else:
                shared = _shared(node.chain, chain)
                if node.count < 0 and deepest and node.chain is not chain:
                    node.count = shared  # here the two part
                elif node.count > shared:
                    node.count = shared  # a template that writes earlier turns otherwise
                node.grown = min(node.grown, shared)
                node.chain, deepest = chain, False
                self._drop_chain(number)
            self._nodes.move_to_end(number)
        self._add_chain(last, chain)

    def _drop_chain(self, last: int) -> None:
        """The prompt that ends with this node is part of another one now, or forgotten."""
        if (chain := self._chains.pop(last, None)) is not None:
            self._prompt_blocks -= len(chain.backwards)

    def _add_chain(self, last: int, chain: _Chain) -> None:
        self._drop_chain(last)
        self._chains[last] = chain
        self._prompt_blocks += len(chain.backwards)
        while self._prompt_blocks > self._max_prompt_blocks:
            oldest = next(iter(self._chains))
            chain = self._chains[oldest]
            self._drop_chain(oldest)
            chain.backwards = array("Q")  # its nodes may outlive it by a little, and know nothing any more
        while len(self._nodes) > MAX_NODES:
            self._nodes.popitem(last=False)


def _held(chain: _Chain, count: int, cached: set[int]) -> int:
    """How many of its first `count` blocks are cached, which those before the first one missing are."""
    length = len(chain.backwards)
    if not count or chain.backwards[-1] not in cached:  # most instances have nothing of most prompts
        return 0
    return length - bisect_left(chain.backwards, True, length - count, length, key=cached.__contains__)


def _shared(one: _Chain, other: _Chain) -> int:
    """How many blocks two prompts begin with together. A block's hash covers all before it, so bisection will do."""
    low, high = 0, min(len(one.backwards), len(other.backwards))
    while low < high:
        middle = (low + high) // 2
        if one.backwards[~middle] == other.backwards[~middle]:
            low = middle + 1
        else:
            high = middle
    return low
