"""What a step holds, who waits, who goes first, and that KV blocks are always accounted for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.sim.profile import Capacity
from epd_serve.sim.scheduler import Scheduler
from epd_serve.sim.sequence import Sequence


def nothing(number: int, last: bool) -> None:
    """Nobody listens."""


def sequence(prompt: int, limit: int = 1, **more: object) -> Sequence:
    return Sequence(prompt_tokens=prompt, limit=limit, on_token=nothing, **more)  # type: ignore[arg-type]


def small(**more: int) -> Capacity:
    return Capacity(**{"max_running": 4, "step_tokens": 16, "kv_tokens": 64, "block_tokens": 4, **more})


def step(scheduler: Scheduler) -> tuple[int, int, int]:
    """Run one: (decodes, prompt tokens, item tokens)."""
    planned = scheduler.plan()
    scheduler.complete(planned)
    return len(planned.decodes), planned.prompt_tokens, planned.item_tokens


def test_a_long_prompt_is_cut_at_the_steps_tokens() -> None:
    scheduler = Scheduler(small())
    scheduler.add(sequence(40, limit=2))
    assert [step(scheduler) for _ in range(5)] == [(0, 16, 0), (0, 16, 0), (0, 8, 0), (1, 0, 0), (0, 0, 0)]


def prefilled(scheduler: Scheduler) -> list[int]:
    """Run a step: prompt tokens of each sequence, in order."""
    planned = scheduler.plan()
    scheduler.complete(planned)
    return [tokens for _, tokens in planned.prefills]


def test_a_long_prompt_leaves_others_their_parts_of_a_step_while_there_are_others() -> None:
    scheduler = Scheduler(small(long_prompt_tokens=5, kv_tokens=256), shares_steps=True)
    scheduler.add(sequence(40))
    assert prefilled(scheduler) == [16]
    scheduler.add(sequence(3))
    scheduler.add(sequence(30))
    assert prefilled(scheduler) == [5, 3, 5], "a third of the step, and no less than what a long prompt has"
    assert prefilled(scheduler) == [8, 8], "half"
    assert prefilled(scheduler) == [8, 8]
    assert prefilled(scheduler) == [3, 8]
    assert prefilled(scheduler) == [1], "and the last one all it needs"


def test_whoever_is_first_takes_what_it_needs_where_steps_are_not_shared() -> None:
    scheduler = Scheduler(small(long_prompt_tokens=5, kv_tokens=256))
    scheduler.add(sequence(40))
    scheduler.add(sequence(3))
    assert [prefilled(scheduler) for _ in range(3)] == [[16], [16], [8, 3]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 16))
def test_no_prompt_waits_for_longer_ones_than_its_parts_take(prompts: list[int], most: int) -> None:
    """Of those that are there together each has its part of every step, so what is before one is the others' parts of
    the steps that it takes itself (`proxy/routing/policy.py: before`)."""
    scheduler = Scheduler(small(long_prompt_tokens=most, kv_tokens=4096, max_running=len(prompts)), shares_steps=True)
    ended: dict[int, int] = {}
    for number, tokens in enumerate(prompts):
        scheduler.add(
            Sequence(prompt_tokens=tokens, limit=1, on_token=lambda *_, number=number: ended.setdefault(number, steps))
        )
    steps = 0
    while scheduler.running or scheduler.waiting:
        steps += 1
        planned = scheduler.plan()
        assert planned.prompt_tokens <= 16
        scheduler.complete(planned)
        assert steps < 5000
    assert sorted(ended) == list(range(len(prompts)))
    part = max(1, 16 // len(prompts))
    if part >= most:
        for number, tokens in enumerate(prompts):
            assert ended[number] <= -(-tokens // part)


def test_a_prompt_takes_what_decodes_leave() -> None:
    scheduler = Scheduler(small())
    scheduler.add(sequence(8, limit=5))
    step(scheduler)
    scheduler.add(sequence(30))
    assert step(scheduler) == (1, 15, 0)


def test_only_so_many_run_at_once_and_the_others_wait() -> None:
    scheduler = Scheduler(small(max_running=2))
    for _ in range(3):
        scheduler.add(sequence(1, limit=2))
    step(scheduler)
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)
    step(scheduler)
    assert step(scheduler) == (0, 1, 0)


def test_a_prompt_waits_until_there_is_kv_for_all_of_it() -> None:
    scheduler = Scheduler(small(kv_tokens=32))
    first, second = sequence(20, limit=2), sequence(20)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    assert second in scheduler.waiting
    while first in scheduler.running:
        step(scheduler)
    step(scheduler)
    assert second in scheduler.running


def test_a_sequence_without_a_block_for_its_next_token_preempts_the_last_one() -> None:
    scheduler = Scheduler(small(kv_tokens=16))
    first, second = sequence(8, limit=8), sequence(7, limit=8)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(3):
        step(scheduler)
    assert (scheduler.preemptions, list(scheduler.running), scheduler.waiting) == (1, [first], [second])
    while first in scheduler.running:
        step(scheduler)
    again = second.prompt_tokens + second.generated
    assert step(scheduler)[1] == again, "its prompt and its answer so far are computed again"


def test_priority_goes_first_only_where_the_stage_looks_at_it() -> None:
    for priorities, expected in ((True, 1), (False, 0)):
        scheduler = Scheduler(small(max_running=1), priorities=priorities)
        queued = [sequence(4, priority=1), sequence(4, priority=0)]
        for one in queued:
            scheduler.add(one)
        scheduler.plan()
        assert list(scheduler.running) == [queued[expected]]


def test_items_are_encoded_before_their_prompt_within_the_encoders_budget() -> None:
    scheduler = Scheduler(small(encoder_tokens=10))
    encoded: list[int] = []
    scheduler.add(sequence(4, items=(6, 6, 30), on_encoded=encoded.append))
    assert [step(scheduler) for _ in range(3)] == [(0, 0, 6), (0, 0, 6), (0, 4, 30)]
    assert encoded == [0, 1, 2]


def test_kv_from_elsewhere_is_reserved_first_and_only_its_last_token_computed() -> None:
    scheduler = Scheduler(small())
    reserved: list[bool] = []
    one = sequence(20, limit=2, on_reserved=lambda: reserved.append(True))
    scheduler.add(one)
    assert step(scheduler) == (0, 0, 0)
    assert reserved == [True] and scheduler.free_blocks == 11
    scheduler.loaded(one)
    assert [step(scheduler), step(scheduler)] == [(0, 1, 0), (1, 0, 0)]
    assert scheduler.free_blocks == 16


def test_kv_that_has_come_is_used_before_one_that_was_preempted_waits_for_blocks() -> None:
    scheduler = Scheduler(small(kv_tokens=16))
    first = sequence(7, limit=8)
    scheduler.add(first)
    step(scheduler)
    second = sequence(8, limit=1, on_reserved=lambda: None)
    scheduler.add(second)
    for _ in range(2):
        step(scheduler)
    assert scheduler.waiting == [first] and second in scheduler.held
    scheduler.loaded(second)
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert first.generated == 8 and second.generated == 1


def test_held_sequences_are_passed_over() -> None:
    scheduler = Scheduler(small())
    held, other = sequence(4), sequence(4)
    scheduler.add(held, held=True)
    scheduler.add(other)
    assert step(scheduler) == (0, 4, 0)
    scheduler.release(held)
    assert step(scheduler) == (0, 4, 0)


def test_kept_kv_is_free_when_the_transfer_is_over() -> None:
    scheduler = Scheduler(small())
    one = sequence(20, keeps_kv=True)
    scheduler.add(one)
    step(scheduler)
    step(scheduler)
    assert not scheduler.running and scheduler.free_blocks == 11
    scheduler.free(one)
    scheduler.free(one)
    assert scheduler.free_blocks == 16


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(-1, 1)), min_size=1, max_size=12),
    st.lists(st.integers(0, 40), max_size=6),
    st.booleans(),
)
def test_everything_that_fits_comes_to_its_end_and_no_block_is_lost(
    asked: list[tuple[int, int, int]], aborts: list[int], priorities: bool
) -> None:
    scheduler = Scheduler(small(), priorities=priorities)
    tokens: dict[int, list[int]] = {}
    every = []
    for number, (prompt, limit, priority) in enumerate(asked):
        tokens[number] = []
        one = sequence(prompt, limit, priority=priority)
        one.on_token = lambda count, last, number=number: tokens[number].append(count)  # type: ignore[misc]
        every.append(one)
        scheduler.add(one)
    gone = set()
    for turn in range(2000):
        if turn in aborts:
            gone.add(turn % len(every))
            scheduler.remove(every[turn % len(every)])
        planned = scheduler.plan()
        held = sum(one.blocks for one in every)
        assert scheduler.free_blocks + held == scheduler.blocks and scheduler.free_blocks >= 0
        assert planned.prompt_tokens + len(planned.decodes) <= 16 and len(scheduler.running) <= 4
        if not planned:
            break
        scheduler.complete(planned)
        here = [one for one in every if one in scheduler.running or one in scheduler.waiting]
        assert scheduler.pending_prompt_tokens == sum(one.prompt_tokens_left for one in here)
    assert not scheduler.waiting and not scheduler.running and scheduler.free_blocks == scheduler.blocks
    for number, (_, limit, _) in enumerate(asked):
        whole = list(range(1, limit + 1))
        assert tokens[number] == whole or (number in gone and tokens[number] == whole[: len(tokens[number])])
