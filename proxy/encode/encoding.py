"""The items of one job on their way through the encoders, while whoever wants them prepares for them.

What is known of the items before they are encoded is enough to call P and D: they render, tokenise and queue while the
tower runs. Such an attempt *goes ahead*. Nobody comes to wait in a circle for it (`docs/waiting.md`): it takes a place
with the stages at once or not at all, so it queues for none, and who has to wait for a place at the encoders, or apart
from others, gives that one back first, which cuts the attempt. At the stages it waits for encoders alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from proxy.registry.feature_directory import FeatureDirectory
from proxy.stages.job import Job


class Encoding:
    """Made by `EncodeStep.begin`, whose context ends it.

    Args:
        task: ends with the job and what became of its items.
        provisional: the job as if all its items had been encoded well.
    """

    def __init__(
        self, job: Job, task: asyncio.Task[Job], directory: FeatureDirectory, provisional: Callable[[], Job]
    ) -> None:
        self._job = job
        self._task = task
        self._directory = directory
        self._provisional = provisional
        self._keys = list(dict.fromkeys(item.key for item in job.items))  # in the order of the prompt

    async def metadata_known(self) -> Job | None:
        """The job with the metadata of all its items, once encoders are at work on those that are not there already;
        None where the encoding has ended before that."""
        return self._provisional() if await self._comes_true(self._is_under_way) else None

    async def first_stored(self) -> None:
        """Until the first item is there, which is announced before an encoder's answer comes, or the encoding has
        ended."""
        await self._comes_true(lambda: self._directory.knows(self._keys[0], time.monotonic()))

    async def _comes_true(self, looked_for: Callable[[], bool]) -> bool:
        """Whether announcements make this true before the encoding ends."""
        news = asyncio.Event()
        ended: Callable[[object], None] = lambda _: news.set()  # noqa: E731 - to be removed again
        self._task.add_done_callback(ended)
        try:
            with self._directory.followed(self._keys, news.set):
                while not self._task.done():
                    if looked_for():
                        return True
                    news.clear()
                    await news.wait()
        finally:
            self._task.remove_done_callback(ended)
        return False

    async def finished(self) -> Job:
        """The job with its features.

        Raises:
            StageRefusal: an encoder refuses an item.
        """
        return await self._task

    def _is_under_way(self) -> bool:
        now, directory = time.monotonic(), self._directory
        return all(directory.metadata(key) and directory.is_coming(key, now) for key in self._keys)

    @contextmanager
    def attempted(self, cut: Callable[[], None]) -> Iterator[None]:
        """The time of an attempt that went ahead. `cut` is called where it has to end: items were given up or refused,
        or the job's place was given back."""

        def ended(task: asyncio.Task[Job]) -> None:
            if task.cancelled() or task.exception() is not None or _missing(task.result()):
                cut()

        passed = self._job.passed
        self._task.add_done_callback(ended)
        passed.cut = cut
        try:
            yield
        finally:
            passed.cut = None
            self._task.remove_done_callback(ended)


def _missing(job: Job) -> bool:
    return job.features is None or bool(job.features.missing)
