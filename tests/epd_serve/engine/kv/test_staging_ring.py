"""The staging ring never hands out bytes twice and loses none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd_serve.engine.kv.shm_send import StagingRing

PAGE = 4096


@given(st.integers(1, 12), st.lists(st.one_of(st.integers(1, 12 * PAGE), st.just(0)), max_size=60), st.randoms())
def test_live_ranges_never_overlap_and_all_space_comes_back(pages: int, steps: list[int], random: object) -> None:
    ring = StagingRing(pages * PAGE)
    live: dict[int, tuple[int, int]] = {}
    seq = 0
    for step in steps:
        if step == 0:  # a credit, in any order
            if live:
                back = random.choice(sorted(live))  # type: ignore[attr-defined]
                del live[back]
                ring.give_back(back)
            continue
        size = min(step, ring.capacity)
        seq += 1
        start = ring.take(seq, size)
        if start is None:
            assert live
            continue
        assert start >= 0
        assert start + size <= ring.capacity
        assert all(start + size <= a or b <= start for a, b in live.values())
        live[seq] = (start, start + size)
    for back in live:
        ring.give_back(back)
    assert ring.take(seq + 1, ring.capacity) == 0


def test_a_full_ring_takes_nothing_until_the_oldest_is_back() -> None:
    ring = StagingRing(2 * PAGE)
    assert (ring.take(1, PAGE), ring.take(2, 1), ring.take(3, 1)) == (0, PAGE, None)
    ring.give_back(2)
    assert ring.take(3, 1) is None
    ring.give_back(1)
    assert ring.take(3, 2 * PAGE) == 0
