"""The access log: one line of JSON for each request that has ended. No content of it, no key, no URL.

Lines leave in a thread of their own, so that a full disk or a terminal that nobody reads keeps no client waiting; what
then finds no room is dropped and counted. Several processes may write one file: a write is whole lines, at its end
(O_APPEND). A file that is renamed or removed, as by logrotate, is followed by a new one within a second.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from epd_serve.errors import ConfigError
from proxy.records.record import Record

logger = logging.getLogger(__name__)

STDERR = "-"
HELD_BYTES = 4 << 20
"""Of lines that wait for the writer."""

GATHER_S = 0.1
LOOK_S = 1.0
LAST_S = 2.0
"""How long the end waits for what is left."""


class Failure(Struct):
    """A call to a stage that failed, and of what."""

    stage: str
    code: str


class Line(Struct, omit_defaults=True):
    """One request. What does not apply, or is not known, is left out.

    Attributes:
        time: of its arrival, in UTC. id: the server's name for it, `client_id` its client's.
        tenant: digest, never the key. modality: `text`, or what it has items of. items: how many, by modality.
        path, encode, prefill, decode: of the last attempt. failures: calls that failed, also where another one helped.
        outcome: the status, `cancelled` (the client left), or `broken` (an error after the first byte).
        code: of the error. finish: the model's reason. events: of a stream. Sizes are those of the bodies.
        ms: of phases, which overlap: `body` arriving, `media`, `queue`, `encode`, `prefill`; `first_byte` and `total`
            since the arrival.
    """

    time: str
    id: str
    client_id: str = ""
    tenant: str = ""
    endpoint: str = ""
    model: str = ""
    stream: bool | None = None
    modality: str = ""
    items: dict[str, int] = {}
    path: str = ""
    encode: list[str] = []
    prefill: str = ""
    decode: str = ""
    attempts: int | None = None
    failures: list[Failure] = []
    outcome: str = ""
    status: int = 0
    code: str = ""
    finish: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    events: int = 0
    bytes_in: int | None = None
    bytes_out: int | None = None
    ms: Mapping[str, float] = {}


def line_of(record: Record) -> Line:
    """The line of a request that has ended."""
    return Line(
        datetime.fromtimestamp(record.began, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
        record.id,
        record.client_id,
        record.tenant,
        record.endpoint,
        record.model,
        record.stream,
        record.modality,
        record.media,
        record.path,
        record.encode,
        record.prefill,
        record.decode,
        record.attempts,
        [Failure(stage, code) for stage, code in record.failures()],
        record.outcome,
        record.status,
        record.code,
        record.finish,
        record.prompt_tokens,
        record.completion_tokens,
        record.cached_tokens,
        record.events_sent,
        record.bytes_in,
        record.bytes_out,
        record.phases_ms(),
    )


class AccessLog:
    """Args:
        path: of the file, or `-` for standard error.
        dropped: called with a number of lines that were lost.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: str, dropped: Callable[[int], object]) -> None:
        self._path = path
        self._dropped = dropped
        self._encoder = msgspec.json.Encoder()
        self._lines: deque[bytes] = deque()
        self._taken_bytes = self._left_bytes = 0  # each written by one thread
        self._wanted = threading.Event()
        self._ending = False
        self._looked_at = time.monotonic()
        self._fd = self._open()
        self._thread = threading.Thread(target=self._write, name="access log", daemon=True)
        self._thread.start()

    def ended(self, record: Record) -> None:
        """Write its line, soon."""
        line = self._encoder.encode(line_of(record)) + b"\n"
        if self._taken_bytes - self._left_bytes + len(line) > HELD_BYTES:
            self._dropped(1)
            return
        self._taken_bytes += len(line)
        self._lines.append(line)
        if not self._wanted.is_set():
            self._wanted.set()

    def close(self) -> None:
        """What has ended is written, unless that takes too long."""
        self._ending = True
        self._wanted.set()
        self._thread.join(LAST_S)
        if not self._thread.is_alive() and self._path != STDERR:
            os.close(self._fd)

    def _write(self) -> None:
        while True:
            self._wanted.wait()
            if not self._ending:
                time.sleep(GATHER_S)  # a system call for many
            self._wanted.clear()
            ending = self._ending
            several = [self._lines.popleft() for _ in range(len(self._lines))]
            try:
                self._follow()
                _write_all(self._fd, b"".join(several))
            except OSError as error:
                self._dropped(len(several))
                logger.warning("%d lines of the access log are lost: %s", len(several), error.strerror)
                time.sleep(LOOK_S)
            self._left_bytes += sum(map(len, several))
            if ending:
                return

    def _follow(self) -> None:
        """Where somebody has taken the file away, go on in another one."""
        now = time.monotonic()
        if self._path == STDERR or now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        here = os.fstat(self._fd)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
            os.close(self._fd)
            self._fd = fd

    def _open(self) -> int:
        if self._path == STDERR:
            return 2
        try:
            return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        except OSError as error:
            raise ConfigError(f"access_log {self._path}: {error.strerror}", param="access_log") from error


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
