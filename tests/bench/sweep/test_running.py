"""A stage that is lost while stages are loaded is noticed."""

from __future__ import annotations

import pytest

from bench.sweep.running import StageStatus, watched
from epd_serve.errors import StageError
from tests.waiting import wait_for


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (StageStatus("P0", "b"), "it was restarted"),
        (StageStatus("P0", "a", down="killed"), "killed"),
    ],
)
def test_a_stage_that_was_lost_is_noticed_even_at_the_very_end(later, why):
    now = [StageStatus("P0", "a")]
    with watched(lambda: now) as found:
        wait_for(lambda: found.incarnations)
        now[0] = later
    assert found.died["P0"].startswith(why)


def test_nobody_who_answers_is_no_sample():
    asked = []

    def look():
        asked.append(1)
        raise StageError("nobody is there", stage="x")

    with watched(look) as found:
        wait_for(lambda: asked)
    assert found.died == {}
