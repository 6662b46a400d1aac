"""The items of one job on their way through the encoders, while whoever wants them prepares for them.

What is known of the items before they are encoded is enough to call P and D: they render, tokenise and queue while the
tower runs. Such an attempt *goes ahead*. It must not become part of a circle of waits; none exists, for these reasons:

* It waits at P and D for encoders only, and encoders wait for neither: P's scheduler holds no blocks for a request
  without features, D's reserves none before the first of them is announced, and a prompt that waits so does not count
  against the gate's capacity.
* It takes a place with the stages at once or not at all, so it queues for none. Who has to wait for a place at the
  encoders, or for a trial, gives that one back first, which cuts the attempt.
* Room in the store: P pins a request's features as they come, so one of several items may hold room that its others
  wait for. None goes ahead while a store is full, and those of several items are cut when one becomes full: from then
  on all wait for their encoders with nothing pinned.
* The wait ends by itself: a feature that no encoder renews fails the request at P after `feature_wait_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from proxy.registry.feature_directory import FeatureDirectory
from proxy.stages.job import Job


class Encoding:
    """Made by `EncodeStep.begin`, whose context ends it.

    Args:
        task: ends with the job and what became of its items.
        provisional: the job as if all its items had been encoded well.
        ahead: of all encodings, what cuts the attempts that could wait for room in a store.
    """

    def __init__(
        self,
        job: Job,
        task: asyncio.Task[Job],
        directory: FeatureDirectory,
        provisional: Callable[[], Job],
        ahead: set[Callable[[], None]],
    ) -> None:
        self._job = job
        self._task = task
        self._directory = directory
        self._provisional = provisional
        self._ahead = ahead
        self._keys = {item.key for item in job.items}

    async def metadata_known(self, now: Callable[[], float]) -> Job | None:
        """The job with the metadata of all its items, once encoders are at work on those that are not there already;
        None where the encoding has ended before that."""
        news = asyncio.Event()
        ended: Callable[[object], None] = lambda _: news.set()  # noqa: E731 - to be removed again
        self._task.add_done_callback(ended)
        try:
            with self._directory.followed(self._keys, news.set):
                while not self._task.done():
                    if all(
                        self._directory.metadata(key) and self._directory.is_coming(key, now()) for key in self._keys
                    ):
                        return self._provisional()
                    news.clear()
                    await news.wait()
        finally:
            self._task.remove_done_callback(ended)
        return None

    async def finished(self) -> Job:
        """The job with its features.

        Raises:
            StageRefusal: an encoder refuses an item.
        """
        return await self._task

    @contextmanager
    def attempted(self, cut: Callable[[], None]) -> Iterator[None]:
        """The time of an attempt that went ahead. `cut` is called where it has to end: items were given up or refused,
        the job's place was given back, or the store is full and it may pin some of several items."""

        def ended(task: asyncio.Task[Job]) -> None:
            if task.cancelled() or task.exception() is not None or _missing(task.result()):
                cut()

        self._task.add_done_callback(ended)
        if len(self._keys) > 1:
            self._ahead.add(cut)
        try:
            with self._job.passed.ahead(cut):
                yield
        finally:
            self._ahead.discard(cut)
            self._task.remove_done_callback(ended)


def _missing(job: Job) -> bool:
    return job.features is None or bool(job.features.missing)
