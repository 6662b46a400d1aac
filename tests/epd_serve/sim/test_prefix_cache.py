"""KV that is used again in simulated stages: by whom, how much, and what is evicted first."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.sim.items import Item
from epd_serve.sim.prefix_cache import BlockPool, block_keys
from epd_serve.sim.prompts import CHAT, Prompt, prompts_of
from epd_serve.sim.scheduler import Scheduler
from epd_serve.sim.sequence import Sequence
from epd_serve.sim.tokens import TOKEN_BYTES, WORDS
from tests.epd_serve.sim.test_scheduler import nothing, small, step

SIZE = 4


def sequence(prompt: Prompt, limit: int = 1, answer: str = "") -> Sequence:
    def keys(generated: int) -> list[int]:
        return block_keys(prompt, SIZE, salt="", answer=answer[: generated * TOKEN_BYTES])

    return Sequence(prompt_tokens=prompt.tokens, limit=limit, on_token=nothing, keys=keys)


def text(tokens: int, word: str = "abcd") -> Prompt:
    return Prompt((word * tokens).encode())


def done(scheduler: Scheduler, one: Sequence) -> list[tuple[int, int, int]]:
    scheduler.add(one)
    steps = [step(scheduler)]
    while one in scheduler.running:
        steps.append(step(scheduler))
    return steps


def test_a_prompt_is_computed_once_but_for_its_last_token() -> None:
    scheduler = Scheduler(small(step_tokens=64))
    assert done(scheduler, sequence(text(10))) == [(0, 10, 0)]
    assert done(scheduler, sequence(text(10))) == [(0, 2, 0)]
    assert done(scheduler, sequence(text(8))) == [(0, 4, 0)], "of whole blocks the last one is computed again"
    assert done(scheduler, sequence(text(10, "wxyz"))) == [(0, 10, 0)]
    assert (scheduler.asked_tokens, scheduler.cached_tokens) == (38, 8 + 4)


def test_the_answer_is_found_by_the_next_turn() -> None:
    scheduler = Scheduler(small(step_tokens=64))
    answer = WORDS[0] * 7
    done(scheduler, sequence(text(6), limit=7, answer=answer))
    assert done(scheduler, sequence(Prompt(text(6).text + answer.encode() + b"more")))[0] == (0, 14 - 12, 0)


def test_a_conversation_keeps_its_tokens_from_turn_to_turn() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,x"}, "uuid": "k"}
    messages = [{"role": "user", "content": [{"type": "text", "text": "odd"}, image, {"type": "text", "text": "so"}]}]
    (first,) = prompts_of(CHAT, {"messages": messages}, 10)
    later = [*messages, {"role": "assistant", "content": WORDS[3]}, {"role": "user", "content": "and?"}]
    (second,) = prompts_of(CHAT, {"messages": later}, 10)
    ours, theirs = (block_keys(one, SIZE, salt="s", answer=extra) for one, extra in ((first, WORDS[3]), (second, "")))
    assert theirs[: len(ours)] == ours and first.item_ends == second.item_ends == (first.places[0] // TOKEN_BYTES + 10,)
    assert not set(ours) & set(block_keys(first, SIZE, salt="other", answer=""))
    another = [{"role": "user", "content": [{"type": "text", "text": "odd"}, {**image, "uuid": "l"}]}]
    (other,) = prompts_of(CHAT, {"messages": another}, 10)
    assert not set(block_keys(other, SIZE, salt="s")[1:]) & set(ours)


def test_items_within_what_is_cached_are_not_encoded_again() -> None:
    prompt = Prompt(b"abcd" * 4, (Item("k", 8, {}, True), Item("l", 4, {}, True)), (0, 16))
    scheduler = Scheduler(small(step_tokens=64))
    for encoded in (12, 4):
        one = replace(sequence(prompt), items=(8, 4), item_ends=prompt.item_ends)
        assert sum(items for _, _, items in done(scheduler, one)) == encoded


def test_what_was_let_go_of_longest_ago_is_evicted_and_of_one_prompt_its_end() -> None:
    scheduler = Scheduler(small(step_tokens=64, kv_tokens=24))
    told: list[tuple[int, bool]] = []
    scheduler.pool.changed = lambda key, known: told.append((key, known))
    old, new = sequence(text(12, "oldd")), sequence(text(8, "neww"))
    done(scheduler, old)
    done(scheduler, new)
    done(scheduler, sequence(text(8, "last")))  # one block is untouched
    assert [key for key, known in told if not known] == [old.keys(0)[2]]
    assert done(scheduler, sequence(text(12, "oldd"))) == [(0, 4, 0)]


def test_of_two_copies_one_may_go() -> None:
    pool = BlockPool(2)
    told: list[tuple[int, bool]] = []
    pool.changed = lambda key, known: told.append((key, known))
    first, second = pool.reserve((), 1), pool.reserve((), 1)
    assert first and second and pool.reserve((), 1) is None
    for blocks in (first, second):
        pool.name(blocks[0], 7)
        pool.release(blocks)
    assert pool.reserve((), 1) and told == [(7, True)] and pool.find([7], 1)
    assert pool.reserve((), 1) and told == [(7, True), (7, False)] and not pool.find([7], 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 14), st.integers(1, 6), st.sampled_from(["aaaa", "bbbb"])), max_size=12))
def test_blocks_are_accounted_for_whatever_is_shared(asked: list[tuple[int, int, str]]) -> None:
    scheduler = Scheduler(small(kv_tokens=24))
    known: set[int] = set()
    scheduler.pool.changed = lambda key, is_known: (known.add if is_known else known.remove)(key)
    everything = [sequence(text(tokens, word), limit, WORDS[0] * limit) for tokens, limit, word in asked]
    for one in everything:
        scheduler.add(one)
    for _ in range(400):
        if not (scheduler.waiting or scheduler.running):
            break
        step(scheduler)
        held = {block for one in everything for block in one.table}
        assert len(held) + scheduler.free_blocks == scheduler.blocks
    assert all(one.generated == one.limit for one in everything) and scheduler.free_blocks == scheduler.blocks
    for one in everything:
        found = scheduler.pool.find(one.keys(one.generated), 99)
        assert known >= set(one.keys(one.generated)[: len(found)])
