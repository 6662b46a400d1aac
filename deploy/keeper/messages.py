"""What a keeper and the parts of a deployment tell each other. Both come from one start of one program.

Each request is answered once, in their order; events come between the answers.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

import msgspec

# Requests.


class Spawn(msgspec.Struct, tag=True, frozen=True):
    """With descriptors: that of the output, then those that are passed."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    record: bytes


class Adopt(msgspec.Struct, tag=True, frozen=True):
    name: str
    pid: int
    record: bytes


class Note(msgspec.Struct, tag=True, frozen=True):
    """With a descriptor, or without."""

    name: str
    record: bytes


class Forget(msgspec.Struct, tag=True, frozen=True):
    name: str


class List(msgspec.Struct, tag=True, frozen=True):
    pass


class Ready(msgspec.Struct, tag=True, frozen=True):
    pass


class Over(msgspec.Struct, tag=True, frozen=True):
    code: int


# Answers.


class Row(msgspec.Struct, frozen=True):
    """`stored`: its descriptor goes with the message."""

    name: str
    record: bytes
    pid: int | None
    code: int | None
    stored: bool


class PartRow(msgspec.Struct, frozen=True):
    """A part of the deployment. `restarts`: lives before this one; `pid` is None between two."""

    name: str
    pid: int | None
    restarts: int


class Listed(msgspec.Struct, tag=True, frozen=True):
    rows: list[Row]
    parts: list[PartRow]


class Done(msgspec.Struct, tag=True, frozen=True):
    """`pid`: of the process that was started or adopted."""

    pid: int = 0


class Refused(msgspec.Struct, tag=True, frozen=True):
    """`number`: that of an OSError, or 0 for a ValueError. `file`: what an OSError names."""

    number: int
    why: str
    file: str = ""

    @classmethod
    def of(cls, error: OSError | ValueError) -> Refused:
        if isinstance(error, ValueError):
            return cls(0, str(error))
        number = errno.ESRCH if isinstance(error, ProcessLookupError) else error.errno or errno.EIO
        return cls(number, error.strerror or str(error), str(error.filename or ""))

    def error(self) -> OSError | ValueError:
        """The most telling subclass of OSError that the number has."""
        return OSError(self.number, self.why, self.file or None) if self.number else ValueError(self.why)


# Events.


class Exited(msgspec.Struct, tag=True, frozen=True):
    name: str
    pid: int
    code: int


class Signalled(msgspec.Struct, tag=True, frozen=True):
    number: int


Request = Spawn | Adopt | Note | Forget | List | Ready | Over
Answer = Listed | Done | Refused
Event = Exited | Signalled

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_told = msgspec.msgpack.Decoder(Answer | Event).decode
