"""Leases: renewed, extended, ended; time that nobody was awake to see counts for nothing."""

from __future__ import annotations

from epd_serve.kv.lease import STALL_S, Leases
from tests.epd_serve.engine.kv.fakes import key_of

A, B = key_of("a"), key_of("b")


def test_a_lease_lapses_at_its_time_and_says_so_until_it_is_ended() -> None:
    leases = Leases()
    leases.grant(A, 1.0)
    leases.grant(B, 9.0)
    assert leases.lapsed(0.5) == []
    assert leases.lapsed(1.0) == [A]
    assert leases.lapsed(1.5) == [A]
    leases.end(A)
    assert leases.lapsed(1.5) == []


def test_a_lease_is_renewed_and_extended() -> None:
    leases = Leases()
    leases.grant(A, 1.0)
    leases.grant(A, 2.0)
    assert leases.lapsed(1.5) == []
    leases.extend(A, 1.0)
    assert leases.lapsed(2.5) == []
    assert leases.lapsed(3.0) == [A]


def test_of_a_time_without_looks_only_so_much_counts() -> None:
    leases = Leases()
    leases.grant(A, STALL_S + 1.0)
    leases.lapsed(0.0)
    assert leases.lapsed(100.0) == []
    assert leases.lapsed(100.9) == []
    assert leases.lapsed(101.0) == [A]


def test_before_the_first_look_nothing_was_slept_through() -> None:
    leases = Leases()
    leases.grant(A, 101.0)
    assert leases.lapsed(100.0) == []
    assert leases.lapsed(101.0) == [A]
