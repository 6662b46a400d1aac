"""The life of one transfer as both ends see it: every state, every event, one table per end. Pure.

What a peer says may be lost, late, doubled, or overtaken by what it said later, so its events stand in every row; an
event of our own that a row lacks is a mistake of ours. P's OVER is final: a transfer id is never used twice.

Three rules make it safe to give D's blocks back, whatever the channels do:

* P writes in SENDING and STOPPING only, and leaves them when its workers have said their last word (CLOSED) or never
  heard of the transfer (UNSENT). What P answers from OVER is therefore true for ever. In AHEAD it knows of no blocks of
  D's to write to.
* D holds its blocks in RESERVED, SENT, CANCELLING and FAILED. FAILED is reached by P's word that it does not write
  (REFUSED, ACKED), or by P's silence; what leads out of all four is the report of D's worker.
* Each side repeats what the other must not miss (READY, CANCEL) until it is answered, and answers are repeatable.

P's first token changes no state: it says nothing about blocks. D's worker reports a transfer that carries one only when
it is there; where P is over without it, the transfer fails as one whose KV did not arrive (SENT, SILENT).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Mapping
from typing import Generic, TypeVar

from epd_serve.wire import TransferKey


class Prefill(enum.Enum):
    """P's states. Nothing is held for D before OFFERED, but P's own blocks in AHEAD."""

    UNKNOWN = "unknown"
    AWAITED = "awaited"  # the request waits here for D's blocks
    AHEAD = "ahead"  # the request computes, or has computed, before D has blocks; its KV waits here
    OFFERED = "offered"  # D's blocks wait for the request
    SENDING = "sending"  # admitted: P's workers may write to D's blocks
    STOPPING = "stopping"  # as before, but nothing new is handed to them
    OVER = "over"


class AtPrefill(enum.Enum):
    """What happens at P."""

    READY = "READY"  # from D
    CANCEL = "CANCEL"  # from D
    ASKED = "request waits for admission"
    ADMITTED = "request admitted"
    BEGUN = "request admitted before D has blocks"
    UNFIT = "offer does not fit the request"
    LEFT = "request left early"
    LAPSED = "patience over"
    SAMPLED = "first token sampled"
    UNSENT = "stopped, and no worker heard of it"
    CLOSED = "workers are done"


class Decode(enum.Enum):
    """D's states. Blocks are held in the last four."""

    UNKNOWN = "unknown"  # also when it is over: unlike P, D owes nobody an answer
    QUEUED = "queued"  # waits for blocks
    WITHDRAWN = "withdrawn"  # left before it had blocks; P is being told
    RESERVED = "reserved"  # blocks offered to P, which may write to them
    SENT = "sent"  # P's workers have said their last word, D's has yet to
    CANCELLING = "cancelling"  # nobody wants them filled any more, P may still write
    FAILED = "failed"  # P does not write any more; the worker has to report it


class AtDecode(enum.Enum):
    """What happens at D."""

    HEARD = "ALIVE lists it"  # from P
    REFUSED = "REFUSED"  # from P
    ACKED = "CANCEL_ACK"  # from P
    TOKEN = "FIRST_TOKEN"  # from P
    QUEUED = "request queued"
    BLOCKS = "blocks reserved"
    LEFT = "request left"
    SILENT = "nothing heard for too long"
    REPORTED = "worker reported it"


S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class Table(Generic[S, E]):
    """One end's transitions."""

    def __init__(self, rows: Mapping[S, Mapping[E, S]]) -> None:
        self.rows = rows

    def after(self, state: S, event: E) -> S:
        row = self.rows[state]
        assert event in row, f"{event} in {state}"
        return row[event]


PREFILL = Table(
    {
        Prefill.UNKNOWN: {
            AtPrefill.READY: Prefill.OFFERED,
            AtPrefill.CANCEL: Prefill.OVER,
            AtPrefill.ASKED: Prefill.AWAITED,
            AtPrefill.LEFT: Prefill.OVER,
        },
        Prefill.AWAITED: {
            AtPrefill.READY: Prefill.OFFERED,
            AtPrefill.CANCEL: Prefill.OVER,
            AtPrefill.ASKED: Prefill.AWAITED,
            AtPrefill.BEGUN: Prefill.AHEAD,
            AtPrefill.LEFT: Prefill.OVER,
            AtPrefill.LAPSED: Prefill.OVER,
        },
        Prefill.AHEAD: {
            AtPrefill.READY: Prefill.SENDING,
            AtPrefill.CANCEL: Prefill.OVER,
            AtPrefill.UNFIT: Prefill.OVER,
            AtPrefill.LEFT: Prefill.OVER,
            AtPrefill.LAPSED: Prefill.OVER,
            AtPrefill.SAMPLED: Prefill.AHEAD,
        },
        Prefill.OFFERED: {
            AtPrefill.READY: Prefill.OFFERED,
            AtPrefill.CANCEL: Prefill.OVER,
            AtPrefill.ADMITTED: Prefill.SENDING,
            AtPrefill.UNFIT: Prefill.OVER,
            AtPrefill.LEFT: Prefill.OVER,
            AtPrefill.LAPSED: Prefill.OVER,
        },
        Prefill.SENDING: {
            AtPrefill.READY: Prefill.SENDING,
            AtPrefill.CANCEL: Prefill.STOPPING,
            AtPrefill.ADMITTED: Prefill.SENDING,  # preempted and back
            AtPrefill.LEFT: Prefill.STOPPING,
            AtPrefill.SAMPLED: Prefill.SENDING,
            AtPrefill.CLOSED: Prefill.OVER,
        },
        Prefill.STOPPING: {
            AtPrefill.READY: Prefill.STOPPING,
            AtPrefill.CANCEL: Prefill.STOPPING,
            AtPrefill.ADMITTED: Prefill.STOPPING,
            AtPrefill.LEFT: Prefill.STOPPING,
            AtPrefill.SAMPLED: Prefill.STOPPING,
            AtPrefill.UNSENT: Prefill.OVER,
            AtPrefill.CLOSED: Prefill.OVER,
        },
        Prefill.OVER: {
            AtPrefill.READY: Prefill.OVER,
            AtPrefill.CANCEL: Prefill.OVER,
            AtPrefill.ASKED: Prefill.OVER,
            AtPrefill.LEFT: Prefill.OVER,
            AtPrefill.SAMPLED: Prefill.OVER,
        },
    }
)

DECODE = Table(
    {
        Decode.UNKNOWN: {
            AtDecode.HEARD: Decode.UNKNOWN,
            AtDecode.TOKEN: Decode.UNKNOWN,
            AtDecode.REFUSED: Decode.UNKNOWN,
            AtDecode.ACKED: Decode.UNKNOWN,
            AtDecode.QUEUED: Decode.QUEUED,
            AtDecode.BLOCKS: Decode.RESERVED,
            AtDecode.LEFT: Decode.UNKNOWN,
            AtDecode.REPORTED: Decode.UNKNOWN,  # blocks that were never offered
        },
        Decode.QUEUED: {
            AtDecode.HEARD: Decode.QUEUED,
            AtDecode.TOKEN: Decode.QUEUED,
            AtDecode.REFUSED: Decode.QUEUED,
            AtDecode.ACKED: Decode.QUEUED,
            AtDecode.QUEUED: Decode.QUEUED,
            AtDecode.BLOCKS: Decode.RESERVED,
            AtDecode.LEFT: Decode.WITHDRAWN,
        },
        Decode.WITHDRAWN: {
            AtDecode.HEARD: Decode.WITHDRAWN,
            AtDecode.TOKEN: Decode.WITHDRAWN,
            AtDecode.REFUSED: Decode.UNKNOWN,
            AtDecode.ACKED: Decode.UNKNOWN,
            AtDecode.LEFT: Decode.WITHDRAWN,
            AtDecode.SILENT: Decode.UNKNOWN,
            AtDecode.REPORTED: Decode.WITHDRAWN,
        },
        Decode.RESERVED: {
            AtDecode.HEARD: Decode.RESERVED,
            AtDecode.TOKEN: Decode.RESERVED,
            AtDecode.REFUSED: Decode.FAILED,
            AtDecode.ACKED: Decode.SENT,
            AtDecode.LEFT: Decode.CANCELLING,
            AtDecode.SILENT: Decode.CANCELLING,
            AtDecode.REPORTED: Decode.UNKNOWN,
        },
        Decode.SENT: {
            AtDecode.HEARD: Decode.SENT,
            AtDecode.TOKEN: Decode.SENT,
            AtDecode.REFUSED: Decode.SENT,
            AtDecode.ACKED: Decode.SENT,
            AtDecode.LEFT: Decode.FAILED,
            AtDecode.SILENT: Decode.FAILED,
            AtDecode.REPORTED: Decode.UNKNOWN,
        },
        Decode.CANCELLING: {
            AtDecode.HEARD: Decode.CANCELLING,
            AtDecode.TOKEN: Decode.CANCELLING,
            AtDecode.REFUSED: Decode.FAILED,
            AtDecode.ACKED: Decode.FAILED,
            AtDecode.LEFT: Decode.CANCELLING,
            AtDecode.SILENT: Decode.FAILED,
            AtDecode.REPORTED: Decode.UNKNOWN,
        },
        Decode.FAILED: {
            AtDecode.HEARD: Decode.FAILED,
            AtDecode.TOKEN: Decode.FAILED,
            AtDecode.REFUSED: Decode.FAILED,
            AtDecode.ACKED: Decode.FAILED,
            AtDecode.LEFT: Decode.FAILED,
            AtDecode.REPORTED: Decode.UNKNOWN,
        },
    }
)


class Tombstones:
    """The last `capacity` transfers that ended, each with the reason, and with P's first token where there was one.

    Late messages about them are answered, not obeyed.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._ends: OrderedDict[TransferKey, tuple[str, int | None]] = OrderedDict()

    def add(self, key: TransferKey, reason: str, token: int | None = None) -> None:
        self._ends[key] = (reason, token)
        self._ends.move_to_end(key)
        if len(self._ends) > self._capacity:
            self._ends.popitem(last=False)

    def get(self, key: TransferKey) -> str | None:
        """The reason, or None for a transfer that is not known to have ended."""
        return self._ends[key][0] if key in self._ends else None

    def token(self, key: TransferKey) -> int | None:
        return self._ends[key][1] if key in self._ends else None

    def __contains__(self, key: TransferKey) -> bool:
        return key in self._ends
