"""Features that wait to be stored keep a bounded amount of memory, and never the model's thread for good."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from epd_serve.engine.ec.write_queue import MAX_QUEUED, Job, WriteQueue
from tests.waiting import PATIENCE_S, wait_for

SIZE = 1000


def job(key: str, feature: torch.Tensor | None = None) -> Job:
    return Job(key, feature, lambda: None)


def of(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def put_in_a_thread(queue: WriteQueue, one: Job) -> tuple[threading.Thread, list[bool]]:
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(queue.put(one)))
    thread.start()
    return thread, taken


def waits(queue: WriteQueue) -> Callable[[], bool]:
    """Whether somebody waits on the queue's condition."""
    return lambda: bool(queue._changed._waiters)  # type: ignore[attr-defined]


def test_what_does_not_fit_waits_until_the_writer_is_done_with_enough() -> None:
    queue = WriteQueue(2 * SIZE, stall_s=PATIENCE_S)
    assert queue.put(job("a", of(SIZE))) and queue.put(job("b", of(SIZE)))
    thread, taken = put_in_a_thread(queue, job("c", of(SIZE)))
    wait_for(waits(queue))
    first = queue.get()
    assert first is not None
    assert not taken, "in the writer's hands it keeps its memory"
    queue.done(first)
    thread.join(PATIENCE_S)
    assert taken == [True] and queue.keys() == ["b", "c"]


def test_nothing_is_waited_for_when_the_writer_gets_nothing_done() -> None:
    queue = WriteQueue(SIZE, stall_s=0.05)
    assert queue.put(job("a", of(SIZE)))
    assert not queue.put(job("b", of(SIZE)))
    assert not queue.put(job("c", of(1))), "the wait is over for all that come after, too"
    assert queue.keys() == ["a"]
    assert queue.put(job("known")), "an announcement keeps no memory"


def test_a_feature_larger_than_the_bound_is_taken_when_nothing_else_is_kept() -> None:
    queue = WriteQueue(SIZE, stall_s=0.0)
    assert queue.put(job("large", of(10 * SIZE)))
    assert not queue.put(job("next", of(1)))
    large = queue.get()
    assert large is not None
    queue.done(large)
    assert queue.put(job("next", of(1)))


def test_views_of_one_tensor_keep_it_once_and_as_long_as_any_of_them() -> None:
    queue = WriteQueue(2 * SIZE, stall_s=0.0)
    batch = of(2 * SIZE)  # as a tower gives the features of several pictures
    assert queue.put(job("a", batch[:10])) and queue.put(job("b", batch[10:20]))
    assert not queue.put(job("c", of(1))), "a slice of ten bytes keeps all of the batch"
    first = queue.get()
    assert first is not None
    queue.done(first)
    assert not queue.put(job("c", of(1)))
    second = queue.get()
    assert second is not None
    queue.done(second)
    assert queue.put(job("c", of(2 * SIZE)))


def test_jobs_are_bounded_by_number_too() -> None:
    queue = WriteQueue(SIZE, stall_s=0.0)
    assert all(queue.put(job(str(number))) for number in range(MAX_QUEUED))
    assert not queue.put(job("one more"))


def test_a_closed_queue_gives_what_it_has_and_takes_nothing() -> None:
    queue = WriteQueue(SIZE, stall_s=PATIENCE_S)
    queue.put(job("a", of(SIZE)))
    thread, taken = put_in_a_thread(queue, job("b", of(SIZE)))
    wait_for(waits(queue))
    queue.close()
    thread.join(PATIENCE_S)
    assert taken == [False]
    last = queue.get()
    assert last is not None and last.key == "a"
    assert queue.get() is None
