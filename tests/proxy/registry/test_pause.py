"""The clock of those who wait while new requests are paused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.registry.pause import Pause

STEPS = st.lists(st.tuples(st.floats(0, 10), st.one_of(st.none(), st.floats(0, 10))), max_size=8)


@given(STEPS)
def test_time_passes_only_outside_of_pauses(steps: list[tuple[float, float | None]]) -> None:
    now = 100.0
    pause = Pause(lambda: now)
    expected, until = pause.now(), now
    for passed_s, paused_s in steps:
        expected += max(0.0, passed_s - max(0.0, until - now))
        now += passed_s
        assert abs(pause.now() - expected) < 1e-6
        assert abs(pause.left_s - max(0.0, until - now)) < 1e-6
        if paused_s is not None:
            pause.begin(paused_s)
            until = now + paused_s
            assert abs(pause.now() - expected) < 1e-6, "it neither jumps nor goes back"
