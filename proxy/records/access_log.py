"""The access log: one line of JSON for each request that has ended. No content of it, no key, no URL."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from proxy.records.lines_file import LinesFile
from proxy.records.record import Record


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
        [Failure(stage, code) for stage, code in record.failures],
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
    """Args: file: where lines go; closed by whoever made it."""

    def __init__(self, file: LinesFile) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def ended(self, record: Record) -> None:
        """Write its line, soon."""
        self._file.write(self._encoder.encode(line_of(record)))
