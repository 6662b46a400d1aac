"""The tables themselves: what a peer says is defined everywhere, everything can end, what is over stays over."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from epd_serve.kv.lifecycle import DECODE, PREFILL, AtDecode, AtPrefill, Decode, Prefill, Table, Tombstones
from epd_serve.wire import TransferKey

ENDS = [(PREFILL, Prefill.OVER), (DECODE, Decode.UNKNOWN)]
ends = pytest.mark.parametrize(("table", "end"), ENDS, ids=["prefill", "decode"])


def reachable(table: Table[Any, Any], start: enum.Enum) -> set[enum.Enum]:
    seen, todo = {start}, [start]
    while todo:
        new = set(table.rows[todo.pop()].values()) - seen
        seen |= new
        todo += new
    return seen


@ends
def test_every_state_has_a_row_is_reachable_and_can_end(table: Table[Any, Any], end: enum.Enum) -> None:
    states = set(type(end))
    assert set(table.rows) == states
    assert reachable(table, type(end)("unknown")) == states
    assert all(end in reachable(table, state) for state in states)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (PREFILL, {AtPrefill.READY, AtPrefill.CANCEL}),
        (DECODE, {AtDecode.HEARD, AtDecode.REFUSED, AtDecode.ACKED, AtDecode.TOKEN}),
    ],
)
def test_what_a_peer_says_is_defined_in_every_state(table: Table[Any, Any], says: set[enum.Enum]) -> None:
    assert all(says <= set(row) for row in table.rows.values())


def test_what_is_over_at_prefill_stays_over() -> None:
    assert reachable(PREFILL, Prefill.OVER) == {Prefill.OVER}


def test_decode_gives_blocks_back_only_by_its_workers_report() -> None:
    held = {Decode.RESERVED, Decode.SENT, Decode.CANCELLING, Decode.FAILED}
    leaves = {event for state in held for event, after in DECODE.rows[state].items() if after not in held}
    assert leaves == {AtDecode.REPORTED}


def test_an_event_of_our_own_that_cannot_be_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match=r"CLOSED in .*OFFERED"):
        PREFILL.after(Prefill.OFFERED, AtPrefill.CLOSED)


def test_tombstones_are_bounded_and_the_oldest_go_first() -> None:
    keys = [TransferKey(f"t-{i}", str(i)) for i in range(6)]
    over = Tombstones(capacity=3)
    for i in range(5):
        over.add(keys[i], f"reason {i}")
    over.add(keys[2], "again")
    over.add(keys[5], "new")
    assert [i for i in range(6) if keys[i] in over] == [2, 4, 5]
    assert over.get(keys[2]) == "again"
