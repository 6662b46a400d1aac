"""D's scheduler side of transfers: reserved blocks, deadlines, cancels. Pure state, no sockets, no vLLM.

States and events: `epd_serve.kv.lifecycle`. Blocks of CANCELLING and FAILED transfers go back to vLLM only through the
worker's report, and only when nothing can write to them any more: DONE or CANCEL_ACK (both follow every write), REFUSED
(nothing is or will be written), or silence for `peer_timeout_s`. After silence the worker drops whatever still arrives;
a one-sided transport adds `quarantine_s`. CANCEL_ACK that nobody asked for answers an offer that was made again: P's
workers are done, and if D's does not hear of it soon, the link between them broke.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd_serve import wire
from epd_serve.kv.lease import Leases
from epd_serve.kv.lifecycle import DECODE, AtDecode, Decode
from epd_serve.wire import TransferKey

ASK_AGAIN_S = 0.75  # P beats every 0.5 s: a transfer that it has not listed for so long is one it does not know
LAST_WORD_S = 2.0  # DONE went another way than P's word that all is said; a worker under load may be late to see it


@dataclass
class _Entry:
    state: Decode
    endpoint: str
    ready: wire.Ready | None = None
    token: int | None = None  # P's first one, once it is known
    quiet_since: float = 0.0  # READY said, or heard of


Outgoing = tuple[str, wire.FromDecodeControl]
"""(endpoint, message): to P's scheduler, or to a worker of D's own."""


def _none(endpoint: str) -> float:
    return 0.0


class DecodeDesk:
    """Not thread-safe; the owner holds one lock around every call. `outbox` collects what is to be sent.

    Args:
        peer_timeout_s: silence of P after which a transfer fails; every heartbeat renews it.
        quarantine_s: added before blocks are given back after silence of the P at an endpoint (0 where late writes
            cannot land).
    """

    def __init__(self, peer_timeout_s: float, quarantine_s: Callable[[str], float] = _none) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._quarantine_s = quarantine_s
        self._entries: dict[TransferKey, _Entry] = {}
        self._leases = Leases()
        self._failures: list[TransferKey] = []
        self._tokens: list[tuple[TransferKey, int]] = []
        self.outbox: list[Outgoing] = []

    # --- from D's scheduler ---------------------------------------------------------------------------------------

    def queued(self, key: TransferKey, endpoint: str) -> None:
        """A request for this transfer is here and has no blocks yet."""
        self._go(key, AtDecode.QUEUED, endpoint)

    def reserved(self, endpoint: str, ready: wire.Ready, now: float) -> None:
        """vLLM allocated the blocks: tell P."""
        self._go(ready.key, AtDecode.BLOCKS, endpoint)
        entry = self._entries[ready.key]
        entry.ready, entry.quiet_since = ready, now
        self._leases.grant(ready.key, now + self._peer_timeout_s)
        self.outbox.append((endpoint, ready))

    def gone(self, key: TransferKey, now: float) -> None:
        """The request left D's scheduler (client gone, or finished normally, when nothing is held any more)."""
        former, state = self._go(key, AtDecode.LEFT)
        if former is Decode.QUEUED:
            self._leases.grant(key, now + self._peer_timeout_s)
        elif former is Decode.RESERVED:
            self._leases.extend(key, self._quarantine(key))
        if state is not former and state is not Decode.FAILED:
            self._cancel(key)

    def take_failures(self) -> list[TransferKey]:
        """Transfers that the worker must report as failed (each appears once)."""
        failures, self._failures = self._failures, []
        return failures

    def take_tokens(self) -> list[tuple[TransferKey, int]]:
        """First tokens that have come for transfers whose blocks are held (each appears once)."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def closed(self, key: TransferKey) -> None:
        """The worker reported it to vLLM: received or failed."""
        self._go(key, AtDecode.REPORTED)

    # --- from P ---------------------------------------------------------------------------------------------------

    def on_message(self, message: wire.ToDecodeScheduler, now: float) -> bool:
        """Apply P's message. Whether it fails a transfer that D holds blocks for."""
        if isinstance(message, wire.FirstToken):
            self._go(message.key, AtDecode.TOKEN)
            self._learn(message.key, message.token)
            return False
        if isinstance(message, wire.CancelAck) and message.token is not None:
            self._learn(message.key, message.token)
        if not isinstance(message, wire.Alive):
            event = AtDecode.REFUSED if isinstance(message, wire.Refused) else AtDecode.ACKED
            former, state = self._go(message.key, event)
            if state is Decode.SENT and state is not former:
                self._leases.grant(message.key, now + LAST_WORD_S)
            return state is Decode.FAILED and state is not former
        for key in message.keys:
            _, state = self._go(key, AtDecode.HEARD)
            if state is Decode.RESERVED:
                self._entries[key].quiet_since = now
                self._leases.grant(key, now + self._peer_timeout_s)
            elif state is Decode.CANCELLING:
                self._leases.grant(key, now + self._peer_timeout_s + self._quarantine(key))
        return False

    # --- time -----------------------------------------------------------------------------------------------------

    def beat(self, now: float) -> None:
        """To be called regularly: says again what P has not answered, and gives silent ones up.

        An offer that P has not mentioned for a while is made again. P may have missed it, or it is over there and D
        missed the answer, which then comes again: nobody waits for the silence to be long enough.
        """
        waiting: dict[str, list[TransferKey]] = {}
        for key, entry in self._entries.items():
            if entry.state is Decode.QUEUED:
                waiting.setdefault(entry.endpoint, []).append(key)
            elif entry.state in (Decode.CANCELLING, Decode.WITHDRAWN):
                self._cancel(key)
            elif entry.state is Decode.RESERVED and now >= entry.quiet_since + ASK_AGAIN_S:
                assert entry.ready is not None
                entry.quiet_since = now
                self.outbox.append((entry.endpoint, entry.ready))
        self.outbox += [(endpoint, wire.Queued(keys)) for endpoint, keys in waiting.items()]
        while lapsed := self._leases.lapsed(now):  # twice where there is no quarantine
            for key in lapsed:
                former, _ = self._go(key, AtDecode.SILENT)
                if former is Decode.RESERVED:  # should P come round, it need not go on
                    self._leases.extend(key, self._quarantine(key))
                    self._cancel(key)

    def _learn(self, key: TransferKey, token: int) -> None:
        """P's first token, once; D's workers are told at once, since their next step may be long in coming."""
        entry = self._entries.get(key)
        if entry is not None and entry.ready is not None and entry.token is None:
            entry.token = token
            self._tokens.append((key, token))
            self.outbox += [(worker, wire.FirstToken(key, token)) for worker in entry.ready.endpoints]

    # --- the table ------------------------------------------------------------------------------------------------

    def _go(self, key: TransferKey, event: AtDecode, endpoint: str = "") -> tuple[Decode, Decode]:
        """Apply an event: (state before, state after)."""
        entry = self._entries.get(key)
        former = Decode.UNKNOWN if entry is None else entry.state
        state = DECODE.after(former, event)
        if state is former:
            return former, state
        if state is Decode.UNKNOWN:
            del self._entries[key]
        elif entry is None:
            self._entries[key] = _Entry(state, endpoint)
        else:
            entry.state = state
        if state in (Decode.UNKNOWN, Decode.FAILED):
            self._leases.end(key)
        if state is Decode.FAILED:
            self._failures.append(key)
        return former, state

    def _quarantine(self, key: TransferKey) -> float:
        return self._quarantine_s(self._entries[key].endpoint)

    def _cancel(self, key: TransferKey) -> None:
        self.outbox.append((self._entries[key].endpoint, wire.Cancel(key)))
