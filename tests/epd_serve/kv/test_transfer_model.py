"""Whole transfers on the real pure parts: chunks, prefix hits, preemption, cancels, a dying P, KV too small on both
sides, a request that goes ahead of D, control messages lost, doubled and overtaken. What must hold: `transfer_world`,
and the end of this file."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from epd_serve.wire import TransferKey
from tests.epd_serve.engine.kv.fakes import key_of
from tests.epd_serve.kv.transfer_world import BEAT_S, BLOCK, Decode, Prefill, Prompt, blocks_of

KEYS = [key_of(str(number)) for number in range(5)]
keys = st.sampled_from(KEYS)
prompts = st.lists(st.integers(1, 20) | st.integers(14, 20), min_size=len(KEYS), max_size=len(KEYS))
ROUNDS = 120  # until five prompts are through, one after the other, in steps of a few tokens


class Transfers(RuleBasedStateMachine):
    """Five requests, each sent to P and to D at moments of its own."""

    @initialize(
        tokens=prompts, hits=prompts, p_blocks=st.integers(5, 10), d_blocks=st.integers(5, 20), group=st.integers(1, 4)
    )
    def begin(self, tokens: list[int], hits: list[int], p_blocks: int, d_blocks: int, group: int) -> None:
        def hit(count: int, draw: int) -> int:
            """Whole blocks, never the last token: at least that is computed."""
            return min(draw % 3, (count - 1) // BLOCK) * BLOCK

        self.prompts = {
            key: Prompt(key, count, hit(count, draw), hit(count, draw // 3))
            for key, count, draw in zip(KEYS, tokens, hits, strict=True)
        }
        assert blocks_of(max(tokens)) <= min(p_blocks, d_blocks)
        self.now = 0.0
        self.sizes = (p_blocks, d_blocks)
        self.group = group
        self.spare = p_blocks - max(map(blocks_of, tokens))
        self.p, self.d = Prefill("p0", p_blocks, group, self.spare), Decode(d_blocks)
        self.lives = 1
        self.to_p: list[Any] = []
        self.to_d: list[Any] = []
        self.data: deque[tuple[TransferKey, bool]] = deque()
        self.came_to_p: set[TransferKey] = set()
        self.came_to_d: set[TransferKey] = set()

    def _collect(self) -> None:
        self.to_p += [message for _, message in self.d.desk.outbox]
        self.to_d += [message for _, message in self.p.desk.outbox]
        self.d.desk.outbox, self.p.desk.outbox = [], []

    # --- requests come and go -------------------------------------------------------------------------------------

    @rule(key=keys)
    def comes_to_p(self, key: TransferKey) -> None:
        if key not in self.came_to_p:
            self.came_to_p.add(key)
            self.p.arrive(self.prompts[key])

    @rule(key=keys)
    def comes_to_d(self, key: TransferKey) -> None:
        if key not in self.came_to_d:
            self.came_to_d.add(key)
            self.d.arrive(self.prompts[key])

    @rule(key=keys)
    def comes_to_both(self, key: TransferKey) -> None:
        self.comes_to_d(key)
        self.comes_to_p(key)

    @rule(key=keys, at_p=st.booleans(), dice=st.integers(0, 1))
    def leaves(self, key: TransferKey, at_p: bool, dice: int) -> None:
        if dice:
            return
        self.p.abort(key) if at_p else self.d.abort(key, self.now)
        self._collect()

    @rule(dice=st.integers(0, 19))
    def p_dies(self, dice: int) -> None:
        if dice == 0 and self.lives == 1:
            self.lives = 2
            self.p = Prefill("p1", self.sizes[0], self.group, self.spare)
            self.came_to_p |= set(KEYS)  # an attempt is repeated as another transfer
            self.data.clear()

    # --- work -----------------------------------------------------------------------------------------------------

    @rule(most=st.integers(1, 9))
    def p_steps(self, most: int) -> None:
        self.p.step(most, self.now)
        self._collect()

    @rule(most=st.integers(1, 9))
    def all_go_on(self, most: int) -> None:
        """The usual way, in one go; the link stays behind."""
        self.d_steps()
        self.beat()
        self.p_steps(most)

    @rule(count=st.integers(1, 4))
    def link_moves(self, count: int) -> None:
        for _ in range(count):
            if not self.p.queue:
                return
            job = self.p.queue.popleft()
            request = self.p.requests[job.key]
            stale = job.run != request.run
            if job.layers is None:
                self.data.append((job.key, job.ok and not stale))
                self.p.said_last_word(job.key)
            elif not stale:
                self.d.take(job, self.p.memory)

    @rule()
    def d_steps(self) -> None:
        self.d.step(self.now)
        self._collect()

    @rule()
    def done_arrives(self) -> None:
        if self.data:
            key, ok = self.data.popleft()
            self.d.take_done(key, ok=ok)

    # --- control messages and time --------------------------------------------------------------------------------

    @rule(to_p=st.booleans(), which=st.integers(0, 3), fate=st.sampled_from(["arrives"] * 4 + ["lost", "doubled"]))
    def a_message(self, to_p: bool, which: int, fate: str) -> None:
        channel = self.to_p if to_p else self.to_d
        if not channel:
            return
        which = min(which, len(channel) - 1)
        if fate == "doubled":
            channel.append(channel[which])
            return
        message = channel.pop(which)
        if fate == "arrives" and to_p:
            self.p.hear(message, self.now)
        elif fate == "arrives":
            self.d.desk.on_message(message, self.now)
        self._collect()

    @rule()
    def beat(self) -> None:
        """All messages arrive: silence is left to `test_desks`."""
        self.now += BEAT_S
        self.p.desk.beat(self.now)
        self.d.desk.beat(self.now)
        self._collect()
        while self.to_p or self.to_d:
            self.a_message(True, 0, "arrives")
            self.a_message(False, 0, "arrives")

    # --- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def no_block_is_lost_or_in_two_places(self) -> None:
        for size, free, tables in (
            (self.sizes[0], self.p.free, [request.table for request in self.p.requests.values()]),
            (self.sizes[1], self.d.free, [request.table for request in self.d.requests.values()]),
        ):
            assert sorted([*free, *(block for table in tables for block in table)]) == list(range(size))

    def teardown(self) -> None:
        """Everything ends within a number of steps: nobody waits for somebody who waits for him."""
        if not hasattr(self, "p"):
            return
        for key in KEYS:
            self.comes_to_both(key)
        for _ in range(ROUNDS):
            if set(self.d.outcomes) == set(KEYS) and not self.p.requests:
                break
            self.p_steps(6)
            self.link_moves(100)
            while self.data:
                self.done_arrives()
            self.d_steps()
            self.beat()
        else:
            raise AssertionError(f"not over: {self.p.requests} {self.d.requests}")
        self.beat()
        assert not self.d.requests
        assert not self.p.desk._entries
        assert not self.d.desk._entries


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestTransfersForLong(Transfers.TestCase):
    settings = settings(max_examples=600, stateful_step_count=80, deadline=None)
