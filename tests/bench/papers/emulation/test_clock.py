from __future__ import annotations

from bench.papers.emulation.clock import Clock


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
