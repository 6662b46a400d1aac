"""What the front door knows of caches: which prompts begin alike, who holds how much of them, and what it forgets."""

from __future__ import annotations

import pytest

from epd_serve.cache_ledger import packed
from epd_serve.wire import CacheReport, PromptBlocks
from proxy.registry.prefix_index import NOTHING, PrefixIndex

SIZE = 16
P0, P1 = ("P0", "a"), ("P1", "b")


def prompt(nodes: list[int], blocks: list[int], *, grown: bool = False) -> PromptBlocks:
    return PromptBlocks(packed(nodes), packed(blocks), grown)


class Told:
    """An index, and the stages that tell it things."""

    def __init__(self, **bounds: int) -> None:
        self.now = 100.0
        self.index = PrefixIndex(**bounds, clock=lambda: self.now)
        self._seqs: dict[tuple[str, str], int] = {}

    def say(
        self,
        who: tuple[str, str],
        stored: list[int] | range = range(0),
        removed: list[int] | range = range(0),
        prompts: tuple[PromptBlocks, ...] = (),
        *,
        part: str = "",
        lost: int = 0,
        size: int = SIZE,
    ) -> bool:
        self._seqs[who] = self._seqs.get(who, 0) + 1 + lost
        return self.index.report(
            CacheReport(*who, self._seqs[who], size, packed(stored), packed(removed), part, list(prompts))
        )

    def held(self, *nodes: int) -> dict[tuple[str, str], int]:
        return {who: tokens // SIZE for who, tokens in self.index.known(nodes).held.items()}


def test_a_later_turn_finds_its_earlier_prompt_and_the_answer() -> None:
    told = Told()
    told.say(P0, range(10), prompts=(prompt([1, 2], [*range(10)]),))
    told.say(P1, range(12), prompts=(prompt([2], [*range(12)], grown=True),))
    again = told.index.known([1, 2])
    assert (again.node, again.tokens) == (1, 10 * SIZE), "of the same prompt the answer is no part"
    later = told.index.known([1, 2, 3, 4])
    assert (later.node, later.tokens) == (1, 12 * SIZE)
    assert told.held(1, 2, 3, 4) == {P0: 10, P1: 12}
    assert told.index.known([7, 8]) is NOTHING


def test_a_shared_beginning_is_known_once_two_prompts_have_parted_there() -> None:
    told = Told()
    told.say(P0, range(8), prompts=(prompt([1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]),))
    assert told.index.known([1, 2, 9]) is NOTHING, "nobody knows where in the first prompt its places are"
    told.say(P1, [*range(5), 25, 26], prompts=(prompt([1, 2, 4], [0, 1, 2, 3, 4, 25, 26]),))
    shared = told.index.known([1, 2, 9])
    assert (shared.node, shared.tokens) == (1, 5 * SIZE)
    assert told.held(1, 2, 3) == {P0: 8, P1: 5} and told.held(1, 2, 4) == {P0: 5, P1: 7}


def test_what_is_held_is_a_beginning() -> None:
    told = Told()
    told.say(P0, range(100), prompts=(prompt([1], [*range(100)]),))
    told.say(P0, removed=range(37, 100))
    assert told.held(1) == {P0: 37}
    told.say(P0, removed=range(37))
    assert told.held(1) == {}


def test_a_template_that_writes_earlier_turns_otherwise_is_noticed() -> None:
    told = Told()
    told.say(P0, range(6), prompts=(prompt([1], [0, 1, 2, 3, 4, 5]),))
    told.say(P0, [20, 21], prompts=(prompt([1, 2], [0, 1, 2, 20, 21]),))
    assert told.index.known([1, 9]).tokens == 3 * SIZE


def test_a_gap_is_asked_about_once_and_the_whole_replaces_what_was_known() -> None:
    told = Told()
    chain = prompt([1], [1, 2, 3])
    assert not told.say(P0, [1, 2, 3], prompts=(chain,))
    assert told.say(P0, lost=1), "something was not heard"
    assert not told.say(P0, lost=1), "it has been asked a moment ago"
    told.now += 2
    assert told.say(P0, lost=1)
    assert not told.say(P0, [1], part="first") and told.held(1) == {P0: 1}
    assert not told.say(P0, [2], part="more") and told.held(1) == {P0: 2}


def test_another_life_has_an_empty_cache_and_a_life_that_ended_none() -> None:
    told = Told()
    told.say(P0, [1, 2], prompts=(prompt([1], [1, 2]),))
    told.say(("P0", "new"), [1])
    assert told.held(1) == {("P0", "new"): 1}
    told.index.forget(P0)
    assert told.held(1) == {("P0", "new"): 1}, "that life was over already"
    told.index.forget(("P0", "new"))
    assert told.held(1) == {} and told.index.blocks == 0


def test_instances_with_other_blocks_do_not_hold_these() -> None:
    told = Told()
    told.say(P0, [1, 2], prompts=(prompt([1], [1, 2]),))
    told.say(P1, [1, 2], size=2 * SIZE)
    assert told.held(1) == {P0: 2}
    assert told.index.held_by(P1) == 2 * 2 * SIZE and told.index.held_by(("P1", "old")) is None


def test_no_more_is_noted_than_may_be() -> None:
    told = Told(max_blocks=10)
    told.say(P0, range(8))
    told.say(P1, range(8))
    assert told.index.blocks == 10
    told.say(P0, removed=range(8))
    told.say(P1, range(8))
    assert told.index.held_by(P1) == 8 * SIZE


def test_of_too_many_prompts_the_oldest_are_forgotten() -> None:
    told = Told(max_prompt_blocks=100)
    for number in range(30):
        blocks = [1000 * number + at for at in range(10)]
        told.say(P0, blocks, prompts=(prompt([number], blocks),))
    assert [number for number in range(30) if told.held(number)] == [*range(20, 30)]
    growing = Told(max_prompt_blocks=100)
    for turn in range(1, 10):  # one conversation: each turn's prompt holds the last one's
        growing.say(P0, range(10 * turn), prompts=(prompt([*range(turn)], [*range(10 * turn)]),))
    assert growing.held(*range(9)) == {P0: 90}


def test_nonsense_is_refused() -> None:
    told = Told()
    with pytest.raises(ValueError, match="0 tokens"):
        told.say(P0, size=0)
    with pytest.raises(ValueError):
        told.index.report(CacheReport("P0", "a", 1, SIZE, stored=b"odd"))
