"""What workers are told, as it travels: whole, or nothing that a parent says."""

from __future__ import annotations

import msgspec
import pytest

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.config.settings import ProxySettings
from proxy.workers.wire import FeedError, Roster, Row, Setup, Told, packed, unpacked
from tests.proxy.fakes import api_keys, settings

ROW = Row(Instance("PD0", Role.PD, "http://h:1", "one"), True, slot=7)
WHOLE = settings(arena="/a", modalities=frozenset({"image"}), api_keys=api_keys("k"))


@pytest.mark.parametrize(
    "value",
    [
        WHOLE,
        Setup(WHOLE, 2, 3.0, 4.0, 5.0),
        Told(7, Roster(1, (ROW,), frozenset({Role.PD}), 6.0, {"task": "why"}), msgspec.Raw(packed(api_keys("k")))),
        Told(8),
    ],
    ids=["settings", "setup", "told", "nothing"],
)
def test_what_is_told_travels_whole(value: ProxySettings | Setup | Told) -> None:
    assert unpacked(packed(value), type(value)) == value


@pytest.mark.parametrize("wrong", [b"\xc1", b"ok", packed(Told(1))], ids=["no msgpack", "a word", "something else"])
def test_what_no_parent_says_is_one_named_error(wrong: bytes) -> None:
    with pytest.raises(FeedError, match="not a Setup"):
        unpacked(wrong, Setup)
