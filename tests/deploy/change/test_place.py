"""Devices of the next layout: who can stay does."""

from __future__ import annotations

import pytest

from deploy.change.place import place
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from tests.deploy.change.worlds import wanted


def placed(new: str, old: str, *, pool: int = 8, both: bool = False) -> tuple[int, ...]:
    return place(parse(new), range(pool), wanted(old, pool=pool, both=both).specs)


@pytest.mark.parametrize(
    ("old", "new", "devices"),
    [
        ("EP-D", "EP-D", (0, 1)),
        ("EP-D", "E-P-D", (2, 3, 1)),  # D stays; where EP is nobody has to go first
        ("E-P-D", "P-D", (1, 2)),
        ("(E-P)-D", "E-(E-P)-D", (2, 0, 1)),
        ("P:tp2-D", "D-P:tp2", (2, 0, 1)),
        ("TP1x2", "(E-PD)x2", (2, 3)),
    ],
)
def test_who_can_stay_does(old, new, devices):
    assert placed(new, old) == devices


def test_devices_in_use_are_taken_where_no_others_are_left():
    assert placed("E-P-D", "EP-D", pool=3) == (2, 0, 1)


def test_an_instance_with_both_halves_stays_in_its_part_or_else_by_a_flip():
    assert placed("D-P", "P-E", both=True) == (2, 0)
    assert placed("D-E", "P-E", both=True) == (0, 1)


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError) as refused:
        placed("E-P-D", "TP1", pool=2)
    assert refused.value.param == "layout"
