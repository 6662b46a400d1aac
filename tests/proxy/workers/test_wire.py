"""Frames as they travel: whole, in pieces, too large, or nothing that a parent says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.workers import wire
from proxy.workers.wire import FeedError, Frames, Keys, Roster, Row, Setup, Told, frame
from tests.proxy.fakes import api_keys, settings

ROW = Row(Instance("PD0", Role.PD, "http://h:1", "one"), True, slot=7)
MESSAGES: list[Told] = [
    Setup(settings(), 2, 3.0, 4.0, 5.0),
    Keys(api_keys("k")),
    Roster(1, (ROW,), frozenset({Role.PD}), 6.0, {"task": "why"}),
    Roster(2, ()),
]


def test_settings_travel_whole() -> None:
    setup = Setup(settings(arena=Path("/a"), modalities=frozenset({"image"}), api_keys=api_keys("k")), 2, 3.0, 4.0, 5.0)
    assert list(Frames().take(frame(setup))) == [setup]


@examples(deadline=None)
@given(cuts=st.lists(st.integers(0, sum(len(frame(one)) for one in MESSAGES))))
def test_messages_are_the_same_in_whatever_pieces_they_come(cuts: list[int]) -> None:
    said = b"".join(map(frame, MESSAGES))
    frames, ends = Frames(), sorted(cuts)
    heard = [
        one for start, end in zip([0, *ends], [*ends, len(said)], strict=True) for one in frames.take(said[start:end])
    ]
    assert heard == MESSAGES


@pytest.mark.parametrize(
    "wrong", [(1 << 31).to_bytes(4, "big"), b"\0\0\0\1\xc1", b"\0\0\0\2ok"], ids=["too large", "no msgpack", "a word"]
)
def test_what_no_parent_says_is_one_named_error(wrong: bytes) -> None:
    with pytest.raises(FeedError):
        list(Frames().take(wrong))


def test_what_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10)
    with pytest.raises(FeedError, match="a Roster of"):
        frame(Roster(1, (ROW,)))
