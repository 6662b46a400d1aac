"""Features that wait to be stored keep a bounded amount of memory, and never the model's thread for good."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from epd_serve.engine.ec import producer
from epd_serve.engine.ec.producer import MAX_QUEUED
from npu_ops.torch_memory import HostMemory
from store.arena import Arena
from store.errors import StoreUnavailableError
from store.feature_pool import FeaturePool
from tests.epd_serve.engine.ec.stages import Remote, Speechless, TwoTiers, feature
from tests.waiting import PATIENCE_S, wait_for

SIZE = 1000


class Slow(HostMemory):
    """A device that is done with a feature when the test says so: `write` lets one more be stored."""

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Semaphore(0)

    def write(self, features: int = 1) -> None:
        self._done.release(features)

    def fence(self) -> Callable[[], None]:
        def wait() -> None:
            assert self._done.acquire(timeout=PATIENCE_S)

        return wait


class Queue:
    """A writer whose device is slow, and what it says."""

    def __init__(self, arena: Arena, bound_bytes: int, stall_s: float = 0.0) -> None:
        self.device, self.told = Slow(), list[tuple[str, str]]()
        pool = FeaturePool(Arena.attach(arena.path))
        self.writer = Speechless(pool, self._tell, memory=self.device, bound_bytes=bound_bytes, stall_s=stall_s)

    def _tell(self, key: str, event: str, *sizes: int, **more: Any) -> None:
        self.told.append((key, event))

    def takes(self, key: str, feature: torch.Tensor) -> bool:
        self.writer.put(key, feature)
        return (key, "put_dropped") not in self.told

    def stores(self, key: str) -> None:
        """The oldest, which this is."""
        self.device.write()
        wait_for(lambda: (key, "put") in self.told and key not in self.writer._pending())

    def takes_later(self, key: str, feature: torch.Tensor) -> threading.Thread:
        thread = threading.Thread(target=self.writer.put, args=(key, feature))
        thread.start()
        wait_for(lambda: self.writer._changed._waiters)  # type: ignore[attr-defined]
        return thread


@pytest.fixture
def queue_of(arena: Arena) -> Iterator[Callable[..., Queue]]:
    made: list[Queue] = []

    def queue(bound_bytes: int, **more: float) -> Queue:
        made.append(Queue(arena, bound_bytes, **more))
        return made[-1]

    yield queue
    for one in made:
        one.device.write(2 * MAX_QUEUED)
        one.writer.close()


def of(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_what_does_not_fit_waits_until_the_writer_is_done_with_enough(queue_of: Callable[..., Queue]) -> None:
    queue = queue_of(2 * SIZE, stall_s=PATIENCE_S)
    assert queue.takes("a", of(SIZE)) and queue.takes("b", of(SIZE))
    thread = queue.takes_later("c", of(SIZE))
    assert queue.writer._pending() == ["a", "b"], "in the writer's hands it keeps its memory"
    queue.stores("a")
    thread.join(PATIENCE_S)
    assert queue.writer._pending() == ["b", "c"]


def test_nothing_is_waited_for_when_the_writer_gets_nothing_done(queue_of: Callable[..., Queue]) -> None:
    queue = queue_of(SIZE, stall_s=0.05)
    assert queue.takes("a", of(SIZE))
    assert not queue.takes("b", of(SIZE))
    assert not queue.takes("c", of(1)), "the wait is over for all that come after, too"
    queue.writer._announce("known")
    assert queue.writer._pending() == ["a", "known"], "an announcement keeps no memory"


def test_a_feature_larger_than_the_bound_is_taken_when_nothing_else_is_kept(queue_of: Callable[..., Queue]) -> None:
    queue = queue_of(SIZE)
    assert queue.takes("large", of(10 * SIZE))
    assert not queue.takes("next", of(1))
    queue.stores("large")
    assert queue.takes("small", of(1))


def test_views_of_one_tensor_keep_it_once_and_as_long_as_any_of_them(queue_of: Callable[..., Queue]) -> None:
    queue = queue_of(2 * SIZE)
    batch = of(2 * SIZE)  # as a tower gives the features of several pictures
    assert queue.takes("a", batch[:10]) and queue.takes("b", batch[10:20])
    assert not queue.takes("c", of(1)), "a slice of ten bytes keeps all of the batch"
    queue.stores("a")
    assert not queue.takes("d", of(1))
    queue.stores("b")
    assert queue.takes("e", of(2 * SIZE))


def test_features_are_bounded_by_number_too(queue_of: Callable[..., Queue]) -> None:
    queue, empty = queue_of(SIZE), of(1)
    assert all(queue.takes(str(number), empty) for number in range(MAX_QUEUED))
    assert not queue.takes("one more", empty)


def test_a_closed_queue_stores_what_it_has_and_takes_nothing(queue_of: Callable[..., Queue]) -> None:
    queue = queue_of(SIZE, stall_s=PATIENCE_S)
    assert queue.takes("a", of(SIZE))
    waiting = queue.takes_later("b", of(SIZE))
    closing = threading.Thread(target=queue.writer.close)
    closing.start()
    waiting.join(PATIENCE_S)
    queue.stores("a")
    closing.join(PATIENCE_S)
    assert queue.told == [("b", "put_dropped"), ("a", "put")]


def test_what_could_not_be_published_counts_as_pending_no_more_and_is_tried_again(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "_PUBLISH_AGAIN_S", 0.05)
    remote, told = Remote(), list[tuple[str, bool]]()
    remote.trouble = StoreUnavailableError("no answer")
    writer = Speechless(
        TwoTiers(arena, remote),
        lambda key, event, nbytes=0, *, pooled=False, reason="": told.append((event, pooled)),
    )
    writer.put("k", feature())
    wait_for(lambda: told.count(("publish_failed", False)) > 1)
    assert writer._pending() == []
    remote.trouble = None
    wait_for(lambda: told[-1] == ("published", True))
    tries = len(told)
    writer._announce("k")  # a later request
    wait_for(lambda: told[tries:] == [("put", False), ("published", True)])
    writer.close()


def test_what_cannot_be_published_is_given_up(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer, "_PUBLISH_AGAIN_S", 0.05)
    monkeypatch.setattr(producer, "_PUBLISH_GIVE_UP_S", 0.12)
    remote = Remote()
    remote.trouble = StoreUnavailableError("no answer")
    writer = Speechless(TwoTiers(arena, remote), lambda *word, **more: None)
    writer.put("k", feature())
    wait_for(lambda: writer._unpublished)
    wait_for(lambda: not writer._unpublished)
    writer.close()
