"""What Mooncake's result codes mean to us: the one seam where they are read. Codes: mooncake-store's `ErrorCode`."""

from __future__ import annotations

from enum import Enum, auto

from store.errors import StoreError, StoreUnavailableError


class Outcome(Enum):
    """How a call ended that the store did answer."""

    DONE = auto()
    MISSING = auto()
    UNFINISHED = auto()  # somebody is writing it, or died while writing it
    LEASED = auto()  # somebody reads it
    FULL = auto()  # no room, or nobody gives any
    LOST = auto()  # the index has it, but its bytes cannot be had: its owner died


_OUTCOMES = {
    -10: Outcome.FULL,  # BUFFER_OVERFLOW
    -101: Outcome.FULL,  # SEGMENT_NOT_FOUND: nobody has mounted memory
    -200: Outcome.FULL,  # NO_AVAILABLE_HANDLE
    -500: Outcome.LOST,  # WRITE_FAIL
    -702: Outcome.LOST,  # INVALID_REPLICA
    -703: Outcome.UNFINISHED,  # REPLICA_IS_NOT_READY
    -704: Outcome.MISSING,  # OBJECT_NOT_FOUND
    -705: Outcome.DONE,  # OBJECT_ALREADY_EXISTS; `put` says 0 for the same
    -706: Outcome.LEASED,  # OBJECT_HAS_LEASE
    -710: Outcome.MISSING,  # REPLICA_NOT_FOUND
    -712: Outcome.MISSING,  # REPLICA_IS_GONE
    -714: Outcome.LEASED,  # OBJECT_REPLICA_BUSY
    -800: Outcome.LOST,  # TRANSFER_FAIL
    -801: Outcome.LOST,  # CHECKSUM_MISMATCH, Mooncake's own
}
_UNAVAILABLE = {
    -103: "the master does not know this client",  # CLIENT_NOT_FOUND: it restarted, the client is about to register
    -707: "a read took longer than the master's lease",  # LEASE_EXPIRED: the value itself is whole
    -900: "the master does not answer",  # RPC_FAIL
    -901: "the master did not answer in time",  # RPC_TIMEOUT
    -1000: "etcd does not answer",
    -1003: "etcd does not answer",
    -1005: "Kubernetes does not answer",
}


def outcome(code: int, what: str) -> Outcome:
    """Reads the result of a call; 0 and above is done.

    Raises:
        StoreUnavailableError: the store did not answer.
        StoreError: a code that a correct call does not give; `what` says which call.
    """
    if code >= 0:
        return Outcome.DONE
    known = _OUTCOMES.get(code)
    if known is not None:
        return known
    if code in _UNAVAILABLE:
        raise StoreUnavailableError(f"Mooncake: {_UNAVAILABLE[code]} ({code})")
    raise StoreError(f"Mooncake: {what}: error {code}")
