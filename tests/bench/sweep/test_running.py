"""What stages run while they are loaded, and that a stage which was lost is noticed."""

from __future__ import annotations

import pytest

from bench.sweep.running import StageStatus, sampled
from epd_serve.errors import StageError
from tests.waiting import wait_for


def test_what_the_stages_run_is_told_by_role():
    def look():
        return [StageStatus("P0", "P", "a", running=2, waiting=1), StageStatus("P1", "P", "b", running=4)]

    with sampled(look) as samples:
        wait_for(lambda: len(samples.seen.get("P", ())) >= 4)

    assert samples.figures() == {"P": {"running": {"mean": 3.0, "p10": 2.0, "p90": 4.0}, "waiting": 0.5}}
    assert samples.died == {}


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (StageStatus("P0", "P", "b"), "it was restarted"),
        (StageStatus("P0", "P", "a", down="killed"), "killed"),
    ],
)
def test_a_stage_that_was_lost_is_noticed_even_at_the_very_end(later, why):
    now = [StageStatus("P0", "P", "a")]
    with sampled(lambda: now) as samples:
        wait_for(lambda: samples.seen)
        now[0] = later
    assert samples.died["P0"].startswith(why)


def test_nobody_who_answers_is_no_sample():
    asked = []

    def look():
        asked.append(1)
        raise StageError("nobody is there", stage="x")

    with sampled(look) as samples:
        wait_for(lambda: asked)
    assert samples.died == {} and samples.figures() == {}
