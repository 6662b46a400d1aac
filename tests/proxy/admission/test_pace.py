"""How long those who come have to wait, from how fast the line moves."""

from __future__ import annotations

import pytest

from proxy.admission.pace import LEAST_GRANTS, Pace
from tests.proxy.admission.lines import Queue


def test_the_wait_is_predicted_from_how_fast_the_line_moves() -> None:
    queue = Queue()
    line = [queue.stands() for _ in range(30)]
    newcomer = queue.enters()
    assert queue.all.predicted_wait_s(newcomer) is None, "nobody has gone yet"
    [running] = queue.grants()
    for second in range(1, 11):
        queue.ends(running)
        [running] = queue.grants(second * 2.0)
    later = queue.enters()
    assert queue.all.predicted_wait_s(later) == pytest.approx(2.0 * 19, rel=0.1)
    urgent = queue.enters(slo_s=-1000.0)
    assert queue.all.predicted_wait_s(urgent) == 0.0, "nobody is ahead of one so urgent"
    for ticket in [one for one in line if one.line is not None]:
        ticket.leave()
    assert queue.all.predicted_wait_s(later) == 0.0


def test_a_calm_says_nothing_about_the_pace() -> None:
    queue = Queue()
    for second in range(100):
        queue.now = second * 10.0
        ticket = queue.stands()
        assert queue.grants() == [ticket]
        queue.now += 1.0
        queue.ends(ticket)
    queue.now = 1000.0
    line = [queue.stands() for _ in range(20)]
    assert queue.grants() == line[:1]
    queue.now = 1001.0
    assert queue.all.predicted_wait_s(queue.enters()) is None


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
