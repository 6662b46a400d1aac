"""What of one prompt's KV P has handed over for sending: the block table as it grows, and how far it has left. Pure.

Blocks leave from D's first missing token on, not from P's: what P's prefix cache hit travels too. What was computed
before D had blocks leaves when it has. A request that is preempted gets a new block table and is sent from the
beginning again, each time over the same blocks of D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epd_serve import wire
from epd_serve.kv.plan import blocks_ready
from epd_serve.wire import TransferKey


@dataclass(frozen=True)
class Chunk:
    """The blocks of one transfer that one prefill step completes.

    Attributes:
        src, dst: block ids at P and at D, same length.
        remaining: prompt tokens still to compute after this step.
    """

    src: tuple[int, ...]
    dst: tuple[int, ...]
    remaining: int


@dataclass
class Sending:
    """A request admitted with a transfer.

    Attributes:
        blocks: its table at P, as far as known.
        computed: tokens that are there after the last step of this run that has been made.
        sent: blocks handed over in this run, counted from the prompt's first; -1: none yet.
        told: some chunk was handed over, in this run or before, so the worker knows of the transfer.
    """

    key: TransferKey
    prompt_tokens: int
    block_size: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    sent: int = -1
    told: bool = False

    @property
    def complete(self) -> bool:
        """All of the prompt was handed over."""
        return self.sent >= -(-self.prompt_tokens // self.block_size)

    @property
    def whole(self) -> bool:
        """All of the prompt is computed, handed over or not."""
        return self.computed >= self.prompt_tokens

    def lose(self) -> None:
        """It was preempted: its blocks are others' now."""
        self.blocks, self.computed, self.sent = [], 0, -1

    def grow(self, blocks: Sequence[int], *, restart: bool) -> None:
        """A step gave it `blocks`. `restart`: they are the whole table, of a first run or of one after a preemption."""
        if restart:
            self.lose()
        self.blocks += blocks

    def chunk(self, ready: wire.Ready) -> Chunk | None:
        """What there is to hand over after the last step; None where no block has become whole."""
        if self.sent < 0:
            self.sent = ready.start_token // self.block_size
        end = blocks_ready(self.computed, self.prompt_tokens, self.block_size)
        remaining = max(0, self.prompt_tokens - self.computed)
        if end <= self.sent and remaining:
            return None
        leaving = slice(self.sent, end)
        self.sent, self.told = end, True
        return Chunk(tuple(self.blocks[leaving]), tuple(ready.blocks[leaving]), remaining)
