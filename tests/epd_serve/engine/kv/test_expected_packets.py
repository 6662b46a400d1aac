"""D's workers take packets of transfers that D's scheduler has told them of, and P hears of blocks only after that."""

from __future__ import annotations

import pytest

from epd_serve.kv.transport_selection import MOONCAKE, SHM
from tests.epd_serve.engine.kv.two_stages import Stages
from tests.waiting import wait_for


@pytest.mark.parametrize("transport", [SHM, MOONCAKE])
def test_kv_that_comes_before_the_step_that_tells_of_its_request_arrives(stages: Stages) -> None:
    """P is quick, and D's step waits for the one before it."""
    stages.start_p()
    stages.wait_up()
    stages.send("early", 0, step_d=False)
    wait_for(lambda: not stages.p_worker._report().open, "P to have sent all", 20)
    assert not stages.over
    wait_for(stages.step_d, "the report of the step that follows", 20)
    assert stages.same(range(3)) and not stages.same(range(3, 4))
    assert stages.d_worker.take_bad_blocks() == set()
