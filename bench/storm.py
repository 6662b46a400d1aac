"""Pictures that storm an encoder past the proxy: so many under way at any time, until the context ends.

Every picture has a name of its own, so that each is encoded; its pixels are the same, so that drawing costs nothing.
Sent from a thread of the measuring process, which has nothing else to do meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from bench.client.connection import post
from bench.client.pool import Pool
from bench.colocation_mix import numbered_picture
from bench.flows import GOOD, verdict
from epd_serve.errors import StageError

PATH = "/v1/chat/completions"
LIMIT_S = 60.0
_NUMBERS = itertools.count()  # of this process: no two storms share a name


class Storm:
    """A storm on the encoder at `url`. Use as a context manager; it ends when what is under way has been answered.

    Attributes:
        encoded: pictures answered so far. seconds: how long it has lasted, once it is over.
        failed: the first answer that was not good; nothing is sent after it.

    Raises:
        StageError: on leaving, when an answer was not good.
    """

    def __init__(self, url: str, model: str, *, side: int, at_once: int) -> None:
        self._url, self._at_once = url, at_once
        self._bodies = encoder_bodies(model, numbered_picture(0, side))
        self._over = threading.Event()
        self.failed = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._blow()), daemon=True)
        self.encoded = 0
        self.seconds = 0.0

    def __enter__(self) -> Storm:
        self._begun = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2 * LIMIT_S)
        self.seconds = time.monotonic() - self._begun
        if self.failed or self._thread.is_alive():
            raise StageError(f"{self._url} in a storm of pictures: {self.failed or 'no answer'}", stage=self._url)

    @property
    def per_second(self) -> float:
        return self.encoded / self.seconds

    async def _blow(self) -> None:
        pool = Pool(self._url)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._at_once):
                    group.create_task(self._one_after_another(pool))
        except BaseExceptionGroup as error:
            self.failed = "; ".join(str(one) for one in error.exceptions)
        finally:
            pool.close()

    async def _one_after_another(self, pool: Pool) -> None:
        while not (self._over.is_set() or self.failed):
            answer = await pool.ask(post(self._url, PATH, json.dumps(next(self._bodies)).encode()), LIMIT_S)
            found = "timeout" if answer is None else verdict(answer, stream=False)
            if found == GOOD:
                self.encoded += 1
            else:
                self.failed = f"{found} {'' if answer is None else answer.tail.decode(errors='replace')}"


def encoder_bodies(model: str, url: str) -> Iterator[dict[str, Any]]:
    """What the proxy would ask of an encoder (`proxy/stages/bodies.py`), without end; each under a key of its own."""
    for number in _NUMBERS:
        key = hashlib.sha256(f"storm {number}".encode()).hexdigest()
        part = {"type": "image_url", "image_url": {"url": url}, "uuid": key}
        yield {"model": model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1, "stream": False}
