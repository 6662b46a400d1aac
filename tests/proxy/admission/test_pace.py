"""How fast a line moves: what is predicted, and what is said for certain when little has been seen."""

from __future__ import annotations

import pytest

from proxy.admission.pace import LEAST_GRANTS, Pace


def moved(grants: int, seconds: float) -> Pace:
    """A line in which somebody has stood for so long, and so many have gone, evenly."""
    pace = Pace()
    pace.tick(0.0, backlog=True)
    for index in range(grants):
        pace.tick((index + 1) * seconds / grants, backlog=True)
        pace.granted()
    return pace


def test_nobody_is_ahead_and_nobody_can_tell() -> None:
    assert moved(10, 5.0).wait_s(0, 5.0) == 0.0
    assert moved(int(LEAST_GRANTS) - 1, 5.0).wait_s(7, 5.0) is None


def test_a_wait_follows_from_the_pace() -> None:
    assert moved(100, 5.0).wait_s(40, 5.0) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("grants", [4, 9, 25, 100])
def test_what_it_takes_at_least_is_less_and_the_less_so_the_more_has_been_seen(grants: int) -> None:
    pace = moved(grants, 1.0)
    likely, least = pace.wait_s(50, 1.0), pace.wait_s(50, 1.0, at_least=True)
    assert likely is not None and least is not None
    assert likely / least == pytest.approx(1 + 2 / grants**0.5 + 1 / grants, rel=0.1)
