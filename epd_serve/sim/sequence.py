"""One prompt with its answer, as the simulated scheduler holds it. Data; transitions are the scheduler's."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Keys
from dataclasses import dataclass, field

from epd_serve.sim.prefix_cache import Block


@dataclass(eq=False)
class Sequence:
    """What a stage has to do for one child of a request.

    Attributes:
        prompt_tokens: of text and media items together; 0 at an encoder.
        limit: tokens to generate; the answer ends with the last one.
        items: tokens of each media item that has to be encoded here first.
        priority: lower is sooner, where the stage looks at priorities.
        on_token: called in order with the number of the token (from 1 on) and whether it is the last; of several equal
            steps that were planned as one with the last of their tokens alone.
        on_admitted: called when it comes to run. on_encoded: called once for the index of each of `items`.
        on_reserved: set where the prompt's KV comes from elsewhere: called when blocks are reserved for it. It goes on
            with `Scheduler.loaded`.
        keeps_kv: its blocks stay taken after its end, until `Scheduler.free`.
        cached: tokens of its prompt that need not be computed here, where nobody tells keys.
        keys: from tokens generated to the hashes of its full blocks (`prefix_cache`); none where nothing is cached.
        item_ends: where in the prompt each of `items` ends; () where that is not known.
        number: of its arrival.
        table: blocks of the KV cache that it holds. named: of how many of them the hash is known.
        computed: tokens that have KV. generated: tokens of the answer.
        to_compute: tokens whose KV it needs before the next token; grows when it is preempted.
        has_kv: its prompt's KV has come from elsewhere and it has not run yet.
        encoding: indices of `items` that are not encoded yet.
    """

    prompt_tokens: int
    limit: int
    on_token: Callable[[int, bool], None]
    items: tuple[int, ...] = ()
    priority: int = 0
    on_admitted: Callable[[], None] = lambda: None
    on_encoded: Callable[[int], None] = lambda index: None
    on_reserved: Callable[[], None] | None = None
    keeps_kv: bool = False
    cached: int = 0
    number: int = 0
    keys: Callable[[int], Keys[int]] = lambda generated: ()
    item_ends: tuple[int, ...] = ()
    table: list[Block] = field(default_factory=list)
    named: int = 0
    computed: int = 0
    generated: int = 0
    to_compute: int = 0
    has_kv: bool = False
    encoding: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return len(self.table)

    @property
    def item_tokens_left(self) -> int:
        return sum([self.items[index] for index in self.encoding])

    @property
    def prompt_tokens_left(self) -> int:
        return max(0, self.to_compute - self.computed)
