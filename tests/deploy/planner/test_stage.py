from __future__ import annotations

import pytest

from deploy.planner.profile import DECODE, ENCODE, PREFILL
from deploy.planner.stage import Clock, SharedDevice, mixture, slowdown

PAIRS = {(ENCODE, PREFILL): 1.5, (ENCODE, DECODE): 1.0, (PREFILL, DECODE): 1.5}
SLOWS = {
    **PAIRS,
    **{(other, one): times for (one, other), times in PAIRS.items()},
    **{(kind, kind): 2.0 for kind in (ENCODE, PREFILL, DECODE)},
}


def ends(*steps: tuple[float, str, float]) -> list[float]:
    """When steps of (begin, kind, seconds) end."""
    clock = Clock()
    device, ended = SharedDevice(clock, SLOWS), [0.0] * len(steps)

    def begin(index: int, kind: str, seconds: float) -> None:
        device.run({kind: 1.0}, seconds, lambda: ended.__setitem__(index, clock.now_s))

    for index, (at_s, kind, seconds) in enumerate(steps):
        clock.after(at_s, lambda index=index, kind=kind, seconds=seconds: begin(index, kind, seconds))
    clock.run()
    return ended


def test_a_step_alone_takes_its_time():
    assert ends((1.0, ENCODE, 2.0)) == [3.0]


def test_equal_work_takes_turns():
    assert ends((0.0, DECODE, 1.0), (0.0, DECODE, 1.0)) == pytest.approx([2.0, 2.0])


def test_unlike_work_may_not_feel_each_other():
    assert ends((0.0, ENCODE, 1.0), (0.0, DECODE, 2.0)) == pytest.approx([1.0, 2.0])


def test_speeds_change_when_another_step_begins_and_when_it_ends():
    # Encode alone for 1 s, beside prefill at 1/1.5 from then on. Prefill: 1 s of work takes 1.5 s, until 2.5. Encode
    # has done 1 + 1.5/1.5 = 2 of its 3 s by then and goes on alone.
    assert ends((0.0, ENCODE, 3.0), (1.0, PREFILL, 1.0)) == pytest.approx([3.5, 2.5])


def test_a_mixture_is_slowed_by_its_parts():
    mixed = mixture(**{PREFILL: 3.0, DECODE: 1.0})

    assert mixed == {PREFILL: 0.75, DECODE: 0.25}
    assert slowdown(mixed, [{ENCODE: 1.0}], SLOWS) == pytest.approx(1 + 0.75 * 0.5)
    assert slowdown({ENCODE: 1.0}, [mixed], SLOWS) == pytest.approx(1 + 0.75 * 0.5)
    assert slowdown(mixed, [], SLOWS) == 1.0


def test_three_on_one_device_add_up():
    assert slowdown({ENCODE: 1.0}, [{PREFILL: 1.0}, {ENCODE: 1.0}], SLOWS) == pytest.approx(1 + 0.5 + 1.0)


def test_a_step_without_any_work_ends_at_once():
    assert mixture(**{ENCODE: 0.0}) == {}
    clock = Clock()
    device, ended = SharedDevice(clock, SLOWS), []
    device.run({}, 0.0, lambda: ended.append(clock.now_s))
    clock.run()

    assert ended == [0.0]


def test_what_is_due_first_happens_first_and_equal_times_keep_their_order():
    clock, seen = Clock(), []
    for seconds, name in ((2.0, "late"), (1.0, "one"), (1.0, "two"), (0.0, "now")):
        clock.after(seconds, lambda name=name: seen.append((clock.now_s, name)))

    clock.run()

    assert seen == [(0.0, "now"), (1.0, "one"), (1.0, "two"), (2.0, "late")]


def test_what_happens_may_ask_for_more():
    clock, seen = Clock(), []

    def again() -> None:
        seen.append(clock.now_s)
        if len(seen) < 3:
            clock.after(0.5, again)

    clock.after(1.0, again)
    clock.run()

    assert seen == [1.0, 1.5, 2.0]
