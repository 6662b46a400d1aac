"""Fair shares of the stages: what accounts that want more than there is get of it, whoever would be first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from proxy.admission.shares import AHEAD_S, MOST, Shares


class Stages:
    """Instances that take from whom they are told to, of those that wait and are not over their share."""

    def __init__(self, **weights: float) -> None:
        self.shares, self.weights = Shares(), weights
        self.waiting: set[str] = set()
        self.got = dict.fromkeys(weights, 0.0)

    def may_go(self) -> list[str]:
        over = self.shares.over(self.waiting)
        assert not self.waiting or self.waiting - over, "somebody is within its share"
        return sorted(self.waiting - over)

    def serve(self, account: str, seconds: float) -> None:
        self.shares.charge(account, seconds, self.weights[account], self.waiting)
        self.got[account] += seconds

    def greedy(self, first: str, seconds: float, turns: int) -> None:
        """Every turn is `first`'s as long as it may have it, else that of the others one by one."""
        for turn in range(turns):
            may = self.may_go()
            self.serve(first if first in may else may[turn % len(may)], seconds)


def test_whoever_waits_alone_may_have_everything() -> None:
    stages = Stages(a=1.0)
    stages.waiting = {"a"}
    stages.greedy("a", 1.0, 1000)
    assert stages.got == {"a": 1000.0}
    assert stages.shares.over(()) == frozenset()


@pytest.mark.parametrize("piece_s", [0.001, AHEAD_S, 1.0])
def test_of_two_that_want_all_each_gets_half_however_small_the_pieces_and_whoever_is_first(piece_s: float) -> None:
    stages = Stages(loud=1.0, quiet=1.0)
    stages.waiting = {"loud", "quiet"}
    stages.greedy("loud", piece_s, 1000)
    assert abs(stages.got["loud"] - stages.got["quiet"]) <= AHEAD_S + piece_s + 1e-9


def test_a_weight_is_a_share_over_those_of_others() -> None:
    stages = Stages(a=3.0, b=1.0)
    stages.waiting = {"a", "b"}
    stages.greedy("b", 0.01, 10_000)
    assert stages.got["a"] / stages.got["b"] == pytest.approx(3.0, rel=0.05)


def test_what_was_used_while_nobody_else_wanted_it_is_held_against_nobody() -> None:
    stages = Stages(early=1.0, late=1.0)
    stages.waiting = {"early"}
    stages.greedy("early", 0.05, 10_000)
    stages.waiting.add("late")
    before = stages.got["early"]
    stages.greedy("late", 0.05, 20)
    assert stages.got["early"] - before == pytest.approx(stages.got["late"], abs=AHEAD_S + 0.1)


def test_nobody_saves_up_for_later() -> None:
    """Who asked for nothing for long has no more than its share after that, either."""
    stages = Stages(steady=1.0, back=1.0)
    stages.serve("back", 1.0)
    stages.waiting = {"steady"}
    stages.greedy("steady", 0.1, 1000)
    stages.waiting.add("back")
    before = dict(stages.got)
    stages.greedy("back", 0.1, 100)
    assert stages.got["back"] - before["back"] == pytest.approx(5.0, abs=0.3)


def test_who_asks_for_little_is_before_who_asks_for_much_each_time_it_comes() -> None:
    """A backlog makes one that comes now and then wait for no more than `AHEAD_S` of work and a piece."""
    stages = Stages(loud=1.0, quiet=1.0)
    stages.waiting = {"loud"}
    for _ in range(50):
        stages.greedy("loud", 0.02, 30)
        stages.waiting.add("quiet")
        before = stages.got["loud"]
        while "loud" in stages.may_go():
            stages.serve("loud", 0.02)
        assert stages.got["loud"] - before <= AHEAD_S + 0.04 + 1e-9
        stages.serve("quiet", 0.02)
        stages.waiting.remove("quiet")


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), st.integers(0, 9), st.floats(0.001, 2.0)),
        st.tuples(st.sampled_from(["wants", "stops"]), st.sampled_from("abcd"), st.just(0.0)),
    ),
    max_size=80,
)


@examples(deadline=None, max_examples=200)
@given(MOVES, st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_among_those_that_want_more_nobody_gets_ahead_of_anybody(
    moves: list[tuple[str, str | int, float]], weights: list[int]
) -> None:
    """From when two want more until one does not, what they got, by weight, differs by a bounded piece, whatever is
    chosen among those that are not over their share."""
    stages = Stages(**dict(zip("abcd", map(float, weights), strict=True)))
    since: dict[frozenset[str], dict[str, float]] = {}
    for what, who, seconds in moves:
        if what == "wants":
            assert isinstance(who, str)
            stages.waiting.add(who)
        elif what == "stops":
            stages.waiting.discard(str(who))
        elif may := stages.may_go():
            assert isinstance(who, int)
            stages.serve(may[who % len(may)], seconds)
        pairs = {frozenset((one, other)) for one in stages.waiting for other in stages.waiting if one != other}
        since = {pair: since.get(pair, dict(stages.got)) for pair in pairs}
        for pair, before in since.items():
            had = [(stages.got[one] - before[one]) / stages.weights[one] for one in pair]
            assert abs(had[0] - had[1]) <= 2 * (AHEAD_S + 2.0) + 1e-6


def test_few_are_remembered_and_none_that_is_ahead_is_forgotten() -> None:
    shares = Shares()
    shares.charge("ahead", 1e6, 1.0, ())
    for number in range(3 * MOST):
        shares.charge(str(number), 1.0, 1.0, ())
    assert len(shares._until) <= MOST + 1
    assert shares.had("ahead") == 1e6
    assert shares.had("0") == shares.had("new") < 1e6
