"""D's scheduler side of transfers: reserved blocks, deadlines, cancels. Pure state, no sockets, no vLLM.

    (unknown) --request queued--> QUEUED --blocks reserved--> RESERVED --worker received DONE--> (over)
    QUEUED --request gone--> (over)
    RESERVED --request gone--> CANCELLING --worker received DONE | CANCEL_ACK | P is dead--> (over)
    RESERVED --REFUSED | P silent--> FAILED --worker reported it--> (over)

Blocks of CANCELLING and FAILED transfers go back to vLLM only through the worker's report, and only when nothing can
write to them any more: DONE or CANCEL_ACK (both follow every write), REFUSED (nothing was written), or silence for
`peer_timeout_s`. After silence the worker drops whatever still arrives; a one-sided transport adds `quarantine_s`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from epd_serve import wire
from epd_serve.wire import TransferKey


class _State(enum.Enum):
    QUEUED = "queued"
    RESERVED = "reserved"
    CANCELLING = "cancelling"
    FAILED = "failed"


@dataclass
class _Entry:
    state: _State
    endpoint: str
    deadline: float = 0.0


Outgoing = tuple[str, wire.ToPrefillScheduler]  # (endpoint of P's scheduler, message)


class DecodeDesk:
    """Not thread-safe; the owner holds one lock around every call. `outbox` collects what is to be sent.

    Args:
        peer_timeout_s: silence of P after which a transfer fails; every heartbeat renews it.
        quarantine_s: added before blocks are given back after silence (0 where late writes cannot land).
    """

    def __init__(self, peer_timeout_s: float, quarantine_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._quarantine_s = quarantine_s
        self._entries: dict[TransferKey, _Entry] = {}
        self._failures: list[TransferKey] = []
        self.outbox: list[Outgoing] = []

    def queued(self, key: TransferKey, endpoint: str) -> None:
        """A request for this transfer is here and has no blocks yet."""
        self._entries.setdefault(key, _Entry(_State.QUEUED, endpoint))

    def reserved(self, endpoint: str, ready: wire.Ready, now: float) -> None:
        """vLLM allocated the blocks: tell P, once."""
        self._entries[ready.key] = _Entry(_State.RESERVED, endpoint, now + self._peer_timeout_s)
        self.outbox.append((endpoint, ready))

    def gone(self, key: TransferKey) -> None:
        """The request left D's scheduler (client gone, or finished normally, when nothing is held any more)."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.state is _State.QUEUED:
            del self._entries[key]
            self.outbox.append((entry.endpoint, wire.Cancel(key)))
        elif entry.state is _State.RESERVED:
            entry.state = _State.CANCELLING
            self.outbox.append((entry.endpoint, wire.Cancel(key)))

    def on_message(self, message: wire.ToDecodeScheduler, now: float) -> None:
        if isinstance(message, wire.Alive):
            for key in message.keys:
                entry = self._entries.get(key)
                if entry is not None:
                    entry.deadline = now + self._peer_timeout_s
            return
        entry = self._entries.get(message.key)
        if entry is not None and entry.state in (_State.RESERVED, _State.CANCELLING):
            self._fail(message.key, entry)

    def expire(self, now: float) -> None:
        """P has been silent for too long: fail, after the quarantine."""
        for key, entry in self._entries.items():
            held = entry.state in (_State.RESERVED, _State.CANCELLING)
            if held and now >= entry.deadline + self._quarantine_s:
                self._fail(key, entry)

    def take_failures(self) -> list[TransferKey]:
        """Transfers that the worker must report as failed (each appears once)."""
        failures, self._failures = self._failures, []
        return failures

    def closed(self, key: TransferKey) -> None:
        """The worker reported it to vLLM: received or failed."""
        self._entries.pop(key, None)

    def still_queued(self) -> list[Outgoing]:
        """Heartbeats to each P: requests that wait here for blocks."""
        by_endpoint: dict[str, list[TransferKey]] = {}
        for key, entry in self._entries.items():
            if entry.state is _State.QUEUED:
                by_endpoint.setdefault(entry.endpoint, []).append(key)
        return [(endpoint, wire.Queued(keys)) for endpoint, keys in by_endpoint.items()]

    def _fail(self, key: TransferKey, entry: _Entry) -> None:
        entry.state = _State.FAILED
        self._failures.append(key)
