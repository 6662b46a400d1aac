"""Counts of leases: exact, never lost, apart by incarnation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.instances import IncarnationId
from proxy.registry.ledger import OwnLedger, Tally, Work, total_of

P0, P1 = ("P0", "one"), ("P1", "one")
LEASES = st.lists(st.tuples(st.sampled_from([P0, P1]), st.sampled_from(list(Work)), st.integers(0, 10**9)), max_size=20)


@given(LEASES, st.data())
def test_what_is_held_is_what_was_acquired_and_not_released(
    leases: list[tuple[IncarnationId, Work, int]], data: st.DataObject
) -> None:
    ledger = OwnLedger()
    for lease in leases:
        ledger.acquire(*lease)
    order = data.draw(st.permutations(range(len(leases))))
    ended = set(order[: data.draw(st.integers(0, len(leases)))])
    for index in ended:
        ledger.release(*leases[index])
    for incarnation in (P0, P1):
        for work in Work:
            held = [one[2] for index, one in enumerate(leases) if one[:2] == (incarnation, work) and index not in ended]
            tally = ledger.tallies(incarnation)[work]
            assert (tally.held, tally.held_weight) == (len(held), sum(held))
        assert ledger.total(incarnation) == total_of(ledger.tallies(incarnation).values())


def test_counts_only_grow_so_that_processes_can_share_them() -> None:
    ledger = OwnLedger()
    ledger.acquire(P0, Work.PREFILL, 5)
    ledger.release(P0, Work.PREFILL, 5)
    ledger.acquire(P0, Work.PREFILL, 7)
    assert ledger.tallies(P0)[Work.PREFILL] == Tally(2, 1, 12, 5)
    assert ledger.tallies(P0)[Work.DECODE] == Tally() == ledger.tallies(P1)[Work.PREFILL]


def test_releasing_what_was_not_acquired_is_a_bug() -> None:
    ledger = OwnLedger()
    ledger.acquire(P0, Work.PREFILL, 5)
    with pytest.raises(AssertionError, match="released more"):
        ledger.release(P0, Work.DECODE, 5)


def test_a_forgotten_incarnation_has_held_nothing() -> None:
    ledger = OwnLedger()
    ledger.acquire(P0, Work.DECODE, 5)
    ledger.release(P0, Work.DECODE, 5)
    ledger.forget(P0)
    ledger.forget(P0)
    assert all(tally == Tally() for tally in ledger.tallies(P0).values())
