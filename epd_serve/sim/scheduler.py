"""What a simulated stage does in its next step: vLLM's scheduling in miniature. Pure: no clock, no sockets.

A step is one batch. Running sequences decode a token each; prompts are computed in what is left of the step's tokens,
cut where it ends (chunked prefill), long ones also where others have their part of it; waiting ones are admitted in
order of (priority,) arrival while there is a place and KV for the whole prompt; items are encoded before their prompt,
in the encoder's budget. A sequence for whose next token there is no block preempts the one that would have come last.
Held sequences (no features, no KV from elsewhere yet) are passed over.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from epd_serve.budgets import Budgets, Limits
from epd_serve.sim.prefix_cache import BlockPool
from epd_serve.sim.profile import Capacity
from epd_serve.sim.sequence import Sequence


@dataclass
class Step:
    """One batch, to be handed back to `Scheduler.complete` when its time has passed.

    Attributes:
        decodes: sequences that get a token. prefills: tokens computed of each. encodes: item of each sequence.
        times: so many equal steps may follow one another before anything changes by itself.
    """

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    encodes: list[tuple[Sequence, int]] = field(default_factory=list)
    times: int = 1

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.prefills)

    @property
    def item_tokens(self) -> int:
        return sum(sequence.items[index] for sequence, index in self.encodes)

    @property
    def item_pairs(self) -> int:
        """Over the items, the sum of their tokens squared."""
        return sum(sequence.items[index] ** 2 for sequence, index in self.encodes)

    @property
    def context_tokens(self) -> float:
        """Over the prompt tokens, the sum of those before each."""
        return sum(tokens * (sequence.computed + (tokens - 1) / 2) for sequence, tokens in self.prefills)

    @property
    def kv_tokens(self) -> int:
        """Of the decodes."""
        return sum([sequence.computed for sequence in self.decodes])

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills or self.encodes)


class Scheduler:
    """One per stage; belongs to one thread.

    Args:
        priorities: whether `Sequence.priority` counts (vLLM's `--scheduling-policy priority`).
        shares_steps: a long prompt leaves others their parts of a step, as those of stages do that only prefill.
        budgets: hold steps to an SLO; None leaves them to `capacity`.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        priorities: bool = False,
        shares_steps: bool = False,
        budgets: Budgets | None = None,
    ) -> None:
        self.capacity = capacity
        self.shares_steps = shares_steps
        self.budgets = budgets
        self.blocks = capacity.kv_tokens // capacity.block_tokens
        self.pool = BlockPool(self.blocks)
        self.preemptions = 0
        self.asked_tokens = self.cached_tokens = 0  # of prompts that began, and what of them was there
        self._unlimited = Limits(capacity.step_tokens, capacity.encoder_tokens)
        self._priorities = priorities
        self._numbers = itertools.count(1)
        self.waiting: list[Sequence] = []  # in order
        self.held: set[Sequence] = set()
        self.running: dict[Sequence, None] = {}  # in order of admission
        self._longest = capacity.step_tokens
        self._begun: list[Sequence] = []  # of those, the ones whose prompt was not computed when a step was planned

    @property
    def free_blocks(self) -> int:
        return self.pool.free

    @property
    def pending_prompt_tokens(self) -> int:
        """Of all that is here, prompt tokens that are not computed yet."""
        return sum([one.to_compute - one.computed for one in self._unfinished() if one.computed < one.to_compute])

    @property
    def pending_item_tokens(self) -> int:
        """Of all that is here, tokens of items that are not encoded yet."""
        return sum([one.item_tokens_left for one in self._unfinished() if one.encoding])

    def _unfinished(self) -> Iterator[Sequence]:
        """All whose prompt may not be computed: those that decode, which are most of many, are left out."""
        begun = (one for one in self._begun if one in self.running)
        return itertools.chain(self.waiting, self.held, begun)

    # --- arrivals and ends ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, *, held: bool = False) -> None:
        """A new sequence. `held`: it waits for `release`."""
        sequence.number = next(self._numbers)
        sequence.to_compute = sequence.prompt_tokens
        sequence.encoding = list(range(len(sequence.items)))
        if held:
            self.held.add(sequence)
        else:
            self._queue(sequence)

    def release(self, sequence: Sequence) -> None:
        """A held sequence may run. No matter if it has left meanwhile."""
        if sequence in self.held:
            self.held.discard(sequence)
            self._queue(sequence)

    def loaded(self, sequence: Sequence) -> None:
        """Its KV has come: only the last prompt token is left to compute."""
        if sequence in self.held:
            self._compute(sequence, sequence.to_compute - 1 - sequence.computed)
            sequence.on_reserved = None
            sequence.has_kv = True
            self.release(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends it early, wherever it is; its blocks are free unless it keeps them."""
        self._drop(sequence)
        if not sequence.keeps_kv:
            self.free(sequence)

    def free(self, sequence: Sequence) -> None:
        """Give its blocks back. Any number of calls."""
        self._compute(sequence, 0)
        self.pool.release(sequence.table)
        sequence.table, sequence.named = [], 0

    # --- steps ----------------------------------------------------------------------------------------------------

    def plan(self, most: int = 1) -> Step:
        """The next batch; an empty one when there is nothing to do. Calls `on_reserved` of those that got blocks.

        Args:
            most: of equal steps that may be planned as one (`Step.times`): of decodes alone, until one has its last
                token or the blocks run out.
        """
        step, begun = Step(), []
        running, decodes = self.running, step.decodes
        size, most_decodes = self.capacity.block_tokens, self.capacity.step_tokens
        for sequence in list(running):  # a planner comes here some thousand times a second
            if sequence.computed < sequence.to_compute or sequence.encoding:
                begun.append(sequence)
            elif (
                len(decodes) < most_decodes
                and sequence in running
                and (sequence.computed < size * len(sequence.table) or self._make_room(step, sequence))
            ):
                decodes.append(sequence)
        self._begun = [sequence for sequence in begun if sequence in running]
        limits = self._limits(step)
        room, items = min(most_decodes - len(decodes), limits.tokens), limits.items
        self._longest = self._longest_part()
        for sequence in self._begun:
            room, items = self._plan_prompt(step, sequence, room, items, limits)
        while room > 0 and self.waiting and len(running) < self.capacity.max_running:
            sequence = self.waiting[0]
            if not (self._reserve(sequence, sequence.to_compute) if sequence.table else self._begin(sequence)):
                break
            del self.waiting[0]
            if sequence.on_reserved is not None:
                self.held.add(sequence)
                sequence.on_reserved()
                continue
            running[sequence] = None
            self._begun.append(sequence)
            sequence.has_kv = False
            sequence.on_admitted()
            room, items = self._plan_prompt(step, sequence, room, items, limits)
        if most > 1 and decodes and not (step.prefills or step.encodes) and len(decodes) == len(running):
            step.times = self._alike(step, most)
        return step

    def _longest_part(self) -> int:
        """Of one prompt in a step, where there is more than one request (vLLM's adaptive long prefill threshold)."""
        capacity, requests = self.capacity, len(self.running) + len(self.waiting)
        if not self.shares_steps or requests < 2:
            return capacity.step_tokens
        return max(capacity.long_prompt_tokens, capacity.step_tokens // requests)

    def _alike(self, step: Step, most: int) -> int:
        """How many steps like this one can follow one another, itself included."""
        times = min(most, min([one.limit - one.generated for one in step.decodes]))
        size = self.capacity.block_tokens
        while times > 1 and len(step.decodes) * -(-times // size) > self.pool.free:
            ends = ((one.computed + times, one.blocks) for one in step.decodes)
            if sum(max(0, -(-tokens // size) - blocks) for tokens, blocks in ends) <= self.pool.free:
                break
            times //= 2
        return max(1, times)

    def complete(self, step: Step, times: int = 1) -> None:
        """Its time has passed: what it did, for all that are still here. `times`: of a step of decodes alone, how many
        of those that it stands for."""
        for sequence, index in step.encodes:
            if sequence in self.running and index in sequence.encoding:
                sequence.encoding.remove(index)
                sequence.on_encoded(index)
        for sequence, tokens in step.prefills:
            if sequence in self.running:
                self._compute(sequence, tokens)
                if not sequence.prompt_tokens_left and not sequence.encoding:
                    self._token(sequence)
        size = self.capacity.block_tokens
        for sequence in step.decodes:
            if sequence in self.running:
                sequence.computed += times
                if sequence.computed > size * len(sequence.table):
                    self._reserve(sequence, sequence.computed)
                self._token(sequence, times)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _make_room(self, step: Step, sequence: Sequence) -> bool:
        """A block for its next token; False where it is preempted itself for want of any."""
        while not self._reserve(sequence, sequence.computed + 1):
            victim = max(self.running, key=self._rank)
            self._preempt(step, victim)
            if victim is sequence:
                return False
        return True

    def _limits(self, step: Step) -> Limits:
        """Of what runs beside the decodes of the step, once `_begun` is known."""
        if self.budgets is None:
            return self._unlimited
        ready = sum(sequence.prompt_tokens_left for sequence in self._begun if not sequence.encoding)
        item = next((one.items[one.encoding[0]] for one in (*self._begun, *self.waiting[:1]) if one.encoding), 0)
        return self.budgets.limits(len(step.decodes), ready, item)

    def _plan_prompt(self, step: Step, sequence: Sequence, room: int, items: int, limits: Limits) -> tuple[int, int]:
        """(tokens, item tokens) left in the step."""
        for index in sequence.encoding:
            size = sequence.items[index]
            if size > items and (step.encodes or not limits.oversize):
                return room, items
            step.encodes.append((sequence, index))
            items = max(0, items - size)
        tokens = min(room, sequence.prompt_tokens_left, self._longest)
        if tokens or not sequence.prompt_tokens_left:
            step.prefills.append((sequence, tokens))
        return room - tokens, items

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        more = -(-tokens // self.capacity.block_tokens) - sequence.blocks
        if more > 0:
            if (blocks := self.pool.reserve((), more)) is None:
                return False
            sequence.table += blocks
        return True

    def _begin(self, sequence: Sequence) -> bool:
        """Blocks for all that it has to compute, and what of it is there already. Its last token always is computed."""
        size = self.capacity.block_tokens
        found = self.pool.find(sequence.keys(sequence.generated), (sequence.to_compute - 1) // size)
        blocks = self.pool.reserve(found, -(-sequence.to_compute // size) - len(found))
        if blocks is None:
            return False
        sequence.table, sequence.named, sequence.computed = blocks, len(found), len(found) * size
        sequence.computed = max(sequence.computed, min(sequence.cached, sequence.to_compute - 1))
        self.asked_tokens += sequence.to_compute
        self.cached_tokens += sequence.computed
        if sequence.item_ends:
            left = [index for index in sequence.encoding if sequence.item_ends[index] > sequence.computed]
            sequence.encoding = left
        return True

    def _compute(self, sequence: Sequence, tokens: int) -> None:
        """So many more of its tokens have KV: full blocks can be found from now on."""
        sequence.computed += tokens
        full = min(sequence.computed // self.capacity.block_tokens, sequence.blocks)
        if full > sequence.named:
            keys = sequence.keys(sequence.generated)
            for at in range(sequence.named, min(full, len(keys))):
                self.pool.name(sequence.table[at], keys[at])
                sequence.named = at + 1

    def _preempt(self, step: Step, victim: Sequence) -> None:
        """All its KV is dropped, to be computed again, here."""
        self.preemptions += 1
        del self.running[victim]
        if victim in step.decodes:
            step.decodes.remove(victim)
        self.free(victim)
        victim.to_compute = victim.prompt_tokens + victim.generated
        victim.computed = 0
        self._queue(victim)

    def _token(self, sequence: Sequence, times: int = 1) -> None:
        sequence.generated += times
        last = sequence.generated >= sequence.limit
        if last:
            self.remove(sequence)
        sequence.on_token(sequence.generated, last)

    def _queue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=self._order)

    def _order(self, sequence: Sequence) -> tuple[bool, int, int]:
        """Those that hold their KV already go first: behind one that waits for blocks they would keep it waiting."""
        return (not sequence.has_kv, *self._rank(sequence))

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.priority if self._priorities else 0, sequence.number)

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self.running:
            del self.running[sequence]
            return
        self.held.discard(sequence)
        at = bisect.bisect_left(self.waiting, self._order(sequence), key=self._order)
        if at < len(self.waiting) and self.waiting[at] is sequence:
            del self.waiting[at]
