"""Images that storm an encoder past the proxy: so many under way at any time, until the context ends.

Every image has a name of its own, so that each is encoded; its pixels are the same, so that drawing costs nothing.
Sent from threads of the measuring process, which has nothing else to do meanwhile.
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from bench.micro.colocation.mix import encode_body, numbered_image
from epd_serve.errors import StageError

LIMIT_S = 60.0
_NUMBERS = itertools.count()  # of this process: no two storms share a name


class Storm:
    """A storm on the encoder at `url`. Use as a context manager; it ends when what is under way has been answered.

    Attributes:
        encoded: images answered so far. seconds: how long it has lasted, once it is over.
        failed: the first answer that was not good; nothing is sent after it.

    Raises:
        StageError: on leaving, when an answer was not good.
    """

    def __init__(self, url: str, model: str, *, side: int, concurrency: int) -> None:
        self._url, self._model, self._concurrency = url, model, concurrency
        self._image = numbered_image(0, side)
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(concurrency)
        self.encoded, self.seconds, self.failed = 0, 0.0, ""

    def __enter__(self) -> Storm:
        self._begun = time.monotonic()
        for _ in range(self._concurrency):
            self._threads.submit(self._send)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._threads.shutdown()
        self.seconds = time.monotonic() - self._begun
        if self.failed:
            raise StageError(f"{self._url} in a storm of images: {self.failed}", stage=self._url)

    @property
    def per_second(self) -> float:
        return self.encoded / self.seconds

    def _send(self) -> None:
        with httpx.Client(timeout=LIMIT_S, trust_env=False) as client:
            while not (self._over.is_set() or self.failed):
                body = encode_body(self._model, self._image, f"storm {next(_NUMBERS)}")
                try:
                    answer = client.post(f"{self._url}/v1/chat/completions", json=body)
                except httpx.HTTPError as error:
                    self.failed = repr(error)
                    return
                if answer.status_code != 200:
                    self.failed = f"status {answer.status_code} {answer.text[:400]}"
                self.encoded += answer.status_code == 200
