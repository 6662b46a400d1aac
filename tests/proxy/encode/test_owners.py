"""Owners of keys: agreed on by everybody, spread over all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.encode.spread import owners


@given(st.text(), st.lists(st.sampled_from([f"E{i}" for i in range(9)]), min_size=2, unique=True), st.data())
def test_owners_agree_whatever_the_order_and_only_the_keys_of_a_dead_one_move(
    key: str, ids: list[str], data: st.DataObject
) -> None:
    order = [ids[index] for index in owners(key, ids)]
    shuffled = data.draw(st.permutations(ids))
    assert [shuffled[index] for index in owners(key, shuffled)] == order
    dead = data.draw(st.sampled_from(ids))
    left = [one for one in ids if one != dead]
    assert [left[index] for index in owners(key, left)] == [one for one in order if one != dead]


def test_keys_spread_over_owners() -> None:
    first = [owners(f"key {index}", ["E0", "E1", "E2", "E3"])[0] for index in range(2000)]
    assert all(420 < first.count(worker) < 580 for worker in range(4))
