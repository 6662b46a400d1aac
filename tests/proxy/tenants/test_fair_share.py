"""One account alone gets half, several get equal parts, and whoever comes next always finds something."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tenants.fair_share import FairShare, NoRoom, OverShare


def greedy(share: FairShare, *accounts: str) -> None:
    """Each takes one at a time, in turns, until none gets more."""
    wanting = list(accounts)
    while wanting:
        for account in list(wanting):
            try:
                share.take(account, 1)
            except (NoRoom, OverShare):
                wanting.remove(account)


@pytest.mark.parametrize("accounts", [1, 2, 3, 7])
def test_so_many_greedy_accounts_get_equal_parts_and_leave_as_much_again(accounts: int) -> None:
    share = FairShare(840, apart=True)
    names = [f"a{index}" for index in range(accounts)]
    greedy(share, *names)
    assert [share.held_by(name) for name in names] == [840 // (accounts + 1)] * accounts


def test_whoever_comes_after_a_greedy_one_finds_room() -> None:
    share = FairShare(100, apart=True)
    greedy(share, "greedy")
    share.take("late", 25)
    with pytest.raises(OverShare):
        share.take("greedy", 1)
    with pytest.raises(NoRoom):
        share.take("late", 26)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_of_little_every_account_gets_one_while_there_is_any(limit: int) -> None:
    share = FairShare(limit, apart=True)
    for number in range(limit):
        share.take(f"a{number}", 1)
    assert share.held == limit and share.most == 1
    with pytest.raises(NoRoom):
        share.take("late", 1)


def test_where_nobody_is_told_apart_all_of_it_is_to_be_had() -> None:
    share = FairShare(10, apart=False)
    share.take("a", 10)
    assert share.most == 10
    with pytest.raises(NoRoom):
        share.take("a", 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=60))
def test_never_more_than_the_limit_is_held_and_all_comes_back(takes: list[tuple[str, int]]) -> None:
    share, held = FairShare(100, apart=True), []
    for account, amount in takes:
        try:
            share.take(account, amount)
            held.append((account, amount))
        except (NoRoom, OverShare):
            pass
        assert share.held == sum(amount for _, amount in held) <= share.limit
        assert all(share.held_by(name) <= share.most for name in "abc")
    for account, amount in held:
        share.give_back(account, amount)
    assert share.held == 0 and not share._held_by
