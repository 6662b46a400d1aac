"""A layout's text with other numbers of instances."""

from __future__ import annotations

import pytest

from deploy.change.scaling import scaled
from epd_serve.errors import ConfigError
from epd_serve.roles import Role

E, P, D, PD = Role.E, Role.P, Role.D, Role.PD


@pytest.mark.parametrize(
    ("layout", "counts", "becomes"),
    [
        ("(E-P)-D", {E: 2}, "(E-P)-D-E"),
        ("(E-P)-D-E", {E: 1}, "(E-P)-D"),
        ("E-P-D", {E: 3, D: 2}, "E-P-D-2E-D"),
        ("2E-P-D", {E: 1}, "E-P-D"),
        ("E-2P:tp2-D", {P: 3}, "E-2P:tp2-D-P:tp2"),
        ("E-PD", {E: 0}, "PD"),
        ("E-PD", {E: 1, PD: 1}, "E-PD"),
    ],
)
def test_bare_instances_come_and_go_at_the_end(layout, counts, becomes):
    assert scaled(layout, counts) == becomes


@pytest.mark.parametrize(
    ("layout", "counts", "becomes"),
    [
        ("2P-2D", {P: 1, D: 3}, "P-3D"),
        ("2P-2D", {P: 3, D: 1}, "2P-D-P"),
        ("E-2P-2D", {P: 1, D: 4}, "E-P-3D-D"),
        ("2P-2D", {P: 1}, "P-2D"),
    ],
)
def test_prefill_and_decode_become_each_other_where_they_can(layout, counts, becomes):
    assert scaled(layout, counts, switchable=True) in (becomes, becomes.replace("3D-D", "4D"))


def test_who_shares_a_device_in_parentheses_is_not_taken_away():
    with pytest.raises(ConfigError) as refused:
        scaled("(E-P)-D", {E: 0})
    assert refused.value.param == "E"
