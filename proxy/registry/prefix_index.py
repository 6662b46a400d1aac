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


@dataclass(slots=True, eq=False)
class _Chain:
    """The blocks of the latest prompt that passes through its nodes: last one first, so that along them those that an
    instance lacks come before those that it holds, which is the order that `bisect` can search without our help.
    nodes: how many there are; a chain without any is forgotten."""

    backwards: array[int]
    block_tokens: int
    nodes: int = 0


@dataclass(slots=True)
class _Node:
    """A place in prompts. count: blocks that lie before it; -1 while only one prompt through it is known, so that
    nobody knows where in its chain the place is. grown: with the answer that followed; 0 while that is not known."""

    chain: _Chain
    count: int
    grown: int


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
        self._nodes: OrderedDict[int, _Node] = OrderedDict()  # those used last at the end
        self._prompt_blocks = 0

    # --- what the stages say ----------------------------------------------------------------------------------------

    def report(self, report: CacheReport) -> bool:
        """Take in what an instance says. Whether it has to be asked for the whole (`wire.WHOLE_TOPIC`): something it
        said was not heard. Raises ValueError: what it says makes no sense."""
        cache = self._caches.get(report.instance)
        if cache is None or (cache.incarnation, cache.block_tokens) != (report.incarnation, report.block_tokens):
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
        cache.blocks.update(stored[: max(self._max_blocks - self.blocks, 0)])
        for prompt in report.prompts:
            self._learn(prompt, report.block_tokens)
        return ask

    def forget(self, incarnation_id: IncarnationId) -> None:
        """This life of an instance is over."""
        if self._cache_of(incarnation_id) is not None:
            del self._caches[incarnation_id[0]]

    @property
    def blocks(self) -> int:
        """Noted in all."""
        return sum(len(cache.blocks) for cache in self._caches.values())

    def held_by(self, incarnation_id: IncarnationId) -> int | None:
        """Tokens that an instance has cached; None of one that has said nothing."""
        cache = self._cache_of(incarnation_id)
        return len(cache.blocks) * cache.block_tokens if cache is not None else None

    # --- what requests ask ------------------------------------------------------------------------------------------

    def known(self, nodes: Sequence[int]) -> Known:
        """What is known of a prompt with these nodes."""
        for at in range(len(nodes) - 1, -1, -1):
            node = self._nodes.get(nodes[at])
            if node is None or node.count < 0:
                continue
            self._nodes.move_to_end(nodes[at])
            count, chain = node.count, node.chain
            if at + 1 < len(nodes):
                count = max(count, node.grown)
            held = {
                (name, cache.incarnation): found * chain.block_tokens
                for name, cache in self._caches.items()
                if cache.block_tokens == chain.block_tokens and (found := _held(chain, count, cache.blocks))
            }
            return Known(at, count * chain.block_tokens, held)
        return NOTHING

    # --- inside -----------------------------------------------------------------------------------------------------

    def _cache_of(self, incarnation_id: IncarnationId) -> _Cache | None:
        cache = self._caches.get(incarnation_id[0])
        return cache if cache is not None and cache.incarnation == incarnation_id[1] else None

    def _learn(self, prompt: PromptBlocks, block_tokens: int) -> None:
        """Raises ValueError: it makes no sense."""
        nodes, blocks = unpacked(prompt.nodes), unpacked(prompt.blocks)
        chain = _Chain(blocks[::-1], block_tokens)
        if prompt.grown:
            node = self._nodes.get(nodes[-1]) if nodes else None
            if node is not None and 0 <= node.count <= _shared(node.chain, chain):
                self._put(nodes[-1], chain, node.count, len(blocks))
            return
        deepest = True
        for number in reversed(nodes):
            node = self._nodes.get(number)
            count, grown = -1, 0
            if number == nodes[-1]:
                count, deepest = len(blocks), node is None
                if node is not None and node.grown > count and _shared(node.chain, chain) == count:
                    chain, grown = node.chain, node.grown  # the same prompt once more: what followed it is known
            elif node is not None and node.chain.block_tokens == block_tokens:
                shared = _shared(node.chain, chain)
                count, grown = node.count, min(node.grown, shared)
                parted = count < 0 and deepest and node.chain is not chain
                if parted or count > shared:  # here, or earlier: a template that writes earlier turns otherwise
                    count = shared
                deepest = False
            self._put(number, chain, count, grown)

    def _put(self, number: int, chain: _Chain, count: int, grown: int) -> None:
        before = self._nodes.pop(number, None)
        self._nodes[number] = _Node(chain, count, grown)
        self._prompt_blocks += 0 if chain.nodes else len(chain.backwards)
        chain.nodes += 1
        if before is not None:
            self._release(before.chain)
        while self._prompt_blocks > self._max_prompt_blocks or len(self._nodes) > MAX_NODES:
            self._release(self._nodes.popitem(last=False)[1].chain)

    def _release(self, chain: _Chain) -> None:
        chain.nodes -= 1
        self._prompt_blocks -= 0 if chain.nodes else len(chain.backwards)


def _held(chain: _Chain, count: int, cached: set[int]) -> int:
    """How many of its first `count` blocks are cached, which those before the first one missing are."""
    length = len(chain.backwards)
    if not count or chain.backwards[-1] not in cached:  # most instances have nothing of most prompts
        return 0
    return length - bisect_left(chain.backwards, True, length - count, length, key=cached.__contains__)


def _shared(one: _Chain, other: _Chain) -> int:
    """How many blocks two prompts begin with together. A block's hash covers all before it, so bisection will do."""
    most = min(len(one.backwards), len(other.backwards))
    return bisect_left(range(most), True, key=lambda at: one.backwards[~at] != other.backwards[~at])
