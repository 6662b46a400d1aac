"""Files of lines, one for each request that has ended: the access log, and the recording of traffic for the planner.

Neither has any content of a request, a key or a URL. The access log is JSON for people and programs. The recording is
what was answered as traffic (`epd_serve/traffic.py`): its items and sessions are told apart by hashes with a key that
this process forgets at its end, so that equal ones can be seen in one recording, and nothing else. A session is who
begins with the same messages.

Lines leave in a thread of their own, so that a full disk or a terminal that nobody reads keeps no client waiting; what
then finds no room is dropped and counted. Several processes may write one file: a write is whole lines, at its end
(O_APPEND). A file that is renamed or removed, as by logrotate, is followed by a new one at the next line.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

import msgspec
import xxhash
from msgspec.structs import replace

from epd_serve.errors import ConfigError
from epd_serve.traffic import Item, Request
from proxy.records.record import Record

logger = logging.getLogger(__name__)

STDERR = "-"
HELD_BYTES = 4 << 20
"""Of lines that wait for the writer."""

GATHER_S = 0.1
FAILED_S = 1.0
"""How long a disk is left alone that has refused a line."""

LAST_S = 2.0
"""How long the end waits for what is left."""

FIELDS: dict[str, Any] = {
    **dict.fromkeys(("id", "client_id", "tenant", "endpoint", "model", "modality"), ""),
    **dict.fromkeys(("path", "prefill", "decode", "outcome", "code", "finish"), ""),
    **dict.fromkeys(("stream", "attempts", "prompt_tokens", "completion_tokens", "cached_tokens"), None),
    **dict.fromkeys(("bytes_in", "bytes_out"), None),
    "media": {},
    "encode": [],
    "status": 0,
    "events_sent": 0,
}
"""Of a record, that its line in the access log has, by what means that it does not apply or is not known: then it is
left out."""

FIRST_NODES = 2
"""Of a prompt, which those who go on with it have in common: what stands before its first answer."""

_encoder = msgspec.json.Encoder()
_fields = attrgetter(*FIELDS)
_Line = msgspec.defstruct(
    "_Line",
    ["time", *((name, Any, nothing) for name, nothing in FIELDS.items()), ("failures", Any, []), ("ms", Any, {})],
    rename={"media": "items", "events_sent": "events"},
    omit_defaults=True,
)


class LinesFile:
    """Args:
        path: of the file, or `-` for standard error.
        setting: which names it, for people.
        dropped: called with a number of lines that were lost.
        most_bytes: beyond half of that another file is begun, and this one is `PATH.1`, in place of the one before; 0
            for no bound.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: str, setting: str, dropped: Callable[[int], object], most_bytes: int = 0) -> None:
        self._path, self._setting, self._most_bytes = path, setting, most_bytes
        self._dropped = dropped
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._taken_bytes = self._left_bytes = 0  # each written by one thread
        try:
            self._fd = self._open()
        except OSError as error:
            raise ConfigError(f"{setting} {path}: {error.strerror}", param=setting) from error
        self._thread = threading.Thread(target=self._run, name=setting, daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Of any thread's, but of one alone: soon, without its end."""
        if self._taken_bytes - self._left_bytes + len(line) > HELD_BYTES:
            self._dropped(1)
            return
        self._taken_bytes += len(line) + 1
        self._lines.put(line + b"\n")

    def close(self) -> None:
        """What has ended is written, unless that takes too long."""
        self._lines.put(b"")
        self._thread.join(LAST_S)

    def _run(self) -> None:
        several, torn = [b"\n"], b""
        while several[-1]:
            several = [self._lines.get()]
            time.sleep(GATHER_S)  # a system call for many
            several += [self._lines.get() for _ in range(self._lines.qsize())]
            data = b"".join(several)
            try:
                if self._path != STDERR:
                    self._follow()
                _write_all(self._fd, torn + data)
                torn = b""
            except OSError as error:
                torn = b"\n"  # half a line may be there: it is not to take the next one along
                self._dropped(data.count(b"\n"))
                logger.warning("lines of %s are lost: %s", self._setting, error.strerror)
                time.sleep(FAILED_S)
            self._left_bytes += len(data)
        if self._path != STDERR:
            os.close(self._fd)

    def _follow(self) -> None:
        """Where the file has been taken away, or is large enough to be, go on in another one."""
        if self._most_bytes and os.fstat(self._fd).st_size > self._most_bytes / 2:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                if self._is_in_place():  # no other process has done it
                    os.replace(self._path, f"{self._path}.1")
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        if not self._is_in_place():
            fd = self._open()
            os.close(self._fd)
            self._fd = fd

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _open(self) -> int:
        """At its end, and at the beginning of a line: the last one may be half of one, of a writer that was killed."""
        if self._path == STDERR:
            return 2
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        if os.path.isfile(self._path) and (size := os.path.getsize(self._path)):
            with open(self._path, "rb") as file:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    _write_all(fd, b"\n")
        return fd


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def access_line(record: Record) -> bytes:
    """What the access log says of a request that has ended, as JSON.

    Beside `FIELDS`: `time` of its arrival, in UTC. `failures`: calls that failed, also where another one helped. `ms`
    of phases, which overlap: `body` arriving, `media`, `queue`, `encode`, `prefill`; `first_byte` and `total` since the
    arrival.
    """
    time_utc = datetime.fromtimestamp(record.began, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    failures = [{"stage": stage, "code": code} for stage, code in record.failures]
    return _encoder.encode(_Line(time_utc, *_fields(record), failures, record.phases_ms()))


class AccessLog:
    """Args: file: where lines go; closed by whoever made it."""

    def __init__(self, file: LinesFile) -> None:
        self._file = file

    def ended(self, record: Record) -> None:
        """Write its line, soon."""
        self._file.write(access_line(record))


class Recording:
    """Args: file: where lines go; closed by whoever made it."""

    def __init__(self, file: LinesFile) -> None:
        self._file = file
        self._salt = secrets.randbits(64)
        self._noted: dict[str, tuple[float, tuple[Item, ...], str]] = {}

    def noted(self, record_id: str, prompt_tokens: float, items: Sequence[Item], nodes: Sequence[int]) -> None:
        """What is known of a request before it is answered.

        Args:
            items: with their own keys. nodes: of its prompt (`proxy/stages/prompt.py`).
        """
        own = tuple(replace(item, key=self._hash(item.key.encode())) for item in items)
        session = self._hash(repr(nodes[:FIRST_NODES]).encode()) if len(nodes) >= FIRST_NODES else ""
        self._noted[record_id] = prompt_tokens, own, session

    def ended(self, record: Record) -> None:
        """Write its line, soon, if it was answered."""
        known, tokens = self._noted.pop(record.id, None), record.tokens_sent
        if known is None or record.outcome != "200" or not tokens:
            return
        guessed, items, session = known
        prompt_tokens = max(1, record.prompt_tokens or round(guessed))
        cached = min(record.cached_tokens or 0, prompt_tokens)
        waited_s = record.first_byte_s or 0.0, record.total_s
        row = Request(record.id, record.began, prompt_tokens, tokens, items, session, cached, *waited_s)
        self._file.write(_encoder.encode(row))

    def _hash(self, content: bytes) -> str:
        return xxhash.xxh3_64_hexdigest(content, seed=self._salt)
