"""Fetches from the second tier: in arrival order, once, bounded, dropped when nobody waits any more."""

from __future__ import annotations

from epd_serve.engine.ec.fetcher import FetchQueue


def anyone(key: str, needed: bool) -> bool:
    return True


def test_in_arrival_order_each_key_once() -> None:
    queue = FetchQueue(max_bytes=100)
    for key in "abab":
        queue.add(key, 1, needed=True)
    assert [queue.next(anyone), queue.next(anyone), queue.next(anyone)] == ["a", "b", None]
    queue.add("a", 1, needed=True)  # running
    assert queue.next(anyone) is None
    queue.done("a")
    queue.add("a", 1, needed=True)
    assert queue.next(anyone) == "a"


def test_the_bytes_in_flight_are_bounded_but_a_large_feature_goes_alone() -> None:
    queue = FetchQueue(max_bytes=100)
    for key, nbytes in (("a", 60), ("b", 60), ("huge", 500)):
        queue.add(key, nbytes, needed=True)
    assert [queue.next(anyone), queue.next(anyone)] == ["a", None]
    queue.done("a")
    assert [queue.next(anyone), queue.next(anyone)] == ["b", None]
    queue.done("b")
    assert queue.next(anyone) == "huge"


def test_the_line_is_bounded_for_prefetches_only() -> None:
    queue = FetchQueue(max_bytes=100, max_waiting=1)
    assert queue.add("a", 1, needed=False)
    assert not queue.add("b", 1, needed=False)
    assert queue.add("c", 1, needed=True)


def test_what_nobody_wants_any_more_is_dropped_before_it_begins() -> None:
    queue = FetchQueue(max_bytes=100)
    queue.add("gone", 1, needed=True)
    queue.add("prefetch", 1, needed=False)
    assert queue.next(lambda key, needed: not needed) == "prefetch"
    assert "gone" not in queue
