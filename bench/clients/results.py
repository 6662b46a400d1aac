"""What became of requests and runs: a record of each request, in memory and in a file, and a result with a row per run.

All times of records are CLOCK_MONOTONIC seconds, as the phase stamps of one host are; a time that never came is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from bench.record import read_lines, write
from epd_serve.errors import ConfigError

LIMIT_S = 60.0
"""How long one request may take, where nobody says."""


class Outcome(StrEnum):
    """How a request ended.

    OK: a whole answer. ERROR: refused, failed, or no OpenAI answer. TRUNCATED: an answer that began and has no proper
    end, or fewer tokens than it was to have. CANCELLED: the client left, as it was meant to, or since the run was
    ended. TIMEOUT: it took longer than any may.
    """

    OK = "ok"
    ERROR = "error"
    TRUNCATED = "truncated"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request.

    Attributes:
        run: which run of a sweep. n: number within its flow. id: sent as `x-request-id`. spec: names what was sent.
        due_s: when it was to be sent; in a closed loop when it was. ready_s: when the sender came to it.
        sent_s: when its first byte was written, which is after a connection was there.
        first_byte_s: first byte of the answer's body.
        token_s: when each event with content was read; several read at once have one time.
        last_s: end of the content. ended_s: end of the answer, or when it was given up.
        usage_tokens: of the answer, as the server counts. prompt_tokens: likewise.
        fault: what went wrong, in a word that errors are counted by; "" where nothing did. error: what the server said.
        answered_id: the name under which the server says to know it. path, instances: of our proxy, where it told.
        kind: of its flow. text: of the answer, where kept.
    """

    run: str
    n: int
    id: str
    spec: str
    due_s: float
    ready_s: float
    ended_s: float
    outcome: Outcome
    sent_s: float | None = None
    token_s: tuple[float, ...] = ()
    last_s: float | None = None
    status: int = 0
    usage_tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str = ""
    fault: str = ""
    error: str = ""
    answered_id: str = ""
    path: str = ""
    instances: str = ""
    first_byte_s: float | None = None
    kind: str = ""
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def left(self) -> bool:
        """The client left, as it was meant to."""
        return self.fault == "left"

    @property
    def first_s(self) -> float | None:
        return self.token_s[0] if self.token_s else None

    @property
    def output_tokens(self) -> int:
        """As the server counts them; where it does not, one per event with content."""
        return len(self.token_s) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft_s(self) -> float | None:
        """From when it was due to its first content."""
        return self.token_s[0] - self.due_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (n - 1); None for an answer of one token."""
        if not self.token_s or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.token_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From when it was due to the end of its answer."""
        return self.ended_s - self.due_s

    @property
    def itl_s(self) -> list[float]:
        """Times between events with content, which are tokens where the server sends them one by one."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]

    @property
    def late_s(self) -> float:
        """By how much the sender came late to it."""
        return self.ready_s - self.due_s

    def wait_s(self, failed_s: float = LIMIT_S) -> float:
        """From when it was due to the first byte of its answer; `failed_s` where it has no whole answer, so that a
        failure never counts as quick."""
        return self.first_byte_s - self.due_s if self.ok and self.first_byte_s is not None else failed_s


class RecordsFile:
    """Appends records to a file, one JSON line each as it comes: whatever ends a run, what was measured is there.

    Use as a context manager.

    Args:
        append: to what is there, instead of a new file.

    Attributes:
        fault: why nothing more can be kept, or None.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._path = path
        self.fault: ConfigError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab" if append else "wb", buffering=0)
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> RecordsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keep(self, record: RequestRecord) -> None:
        """Writes `record`. Raises ConfigError where the disk is full or gone; half a line may be left."""
        line = msgspec.json.encode(record) + b"\n"
        try:
            while line:  # the second write of a full disk says so
                line = line[self._file.write(line) :]
        except OSError as error:
            self.fault = self._error(error)
            raise self.fault from error

    def _error(self, error: OSError) -> ConfigError:
        return ConfigError(f"--rows {self._path} cannot be written: {error.strerror}", param="--rows")


def read_records(path: Path) -> list[RequestRecord]:
    """Returns the records of a file; half a line at its end is left out. Raises ConfigError as `read_lines`."""
    return read_lines(path, RequestRecord)


class Results:
    """The runs of one server so far.

    Args:
        path: of the result; None: it is not kept. flag: what it belongs to, in errors.
    """

    def __init__(self, path: Path | None, flag: str, env: Mapping[str, Any]) -> None:
        self.path, self.flag, self.env = path, flag, dict(env)
        self.figures: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []

    def keep(self, row: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """A run has ended. Raises ConfigError where the disk is full or gone; the file is then as it was."""
        self.figures |= figures
        self.rows.append(dict(row))
        self.write()

    def write(self) -> None:
        if self.path is not None:
            write(self.path, self.figures, self.env, self.rows, self.flag)


def append_lines(path: Path, lines: Sequence[Mapping[str, Any]], flag: str) -> None:
    """JSON, a line each. Raises ConfigError."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: {error.strerror}", param=flag) from error
