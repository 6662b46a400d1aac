"""P's scheduler side of transfers: who may be admitted, and what D is told. Pure state, no sockets, no vLLM.

One entry per transfer, one transition table:

    (unknown) --READY--> OFFERED --request admitted--> SENDING --worker closed it--> (tombstone)
    (unknown) --request asks--> AWAITED --READY--> OFFERED
    AWAITED --patience over--> (tombstone): the request is admitted alone, nothing is sent
    OFFERED --CANCEL | patience over | request gone--> (tombstone), answered CANCEL_ACK or REFUSED at once
    SENDING --CANCEL | request aborted--> STOPPING --worker closed it--> (tombstone)

In SENDING and STOPPING the worker has the last word: its DONE to D's worker follows every write, so it is also the
acknowledgement of a cancel. P admits only what D reserved for, so P's blocks always drain (design §4.5).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from epd_serve import wire
from epd_serve.kv.heads import heads_of
from epd_serve.kv.tombstones import Tombstones
from epd_serve.wire import TransferKey


class Admission(enum.Enum):
    WAIT = "wait"  # D has not reserved yet
    SEND = "send"  # run it and push its KV
    ALONE = "alone"  # run it (vLLM offers no way to fail it here), push nothing


class _State(enum.Enum):
    AWAITED = "awaited"
    OFFERED = "offered"
    SENDING = "sending"
    STOPPING = "stopping"


@dataclass
class _Entry:
    state: _State
    deadline: float
    peer: bytes = b""
    ready: wire.Ready | None = None


Reply = tuple[bytes, wire.ToDecodeScheduler]  # (ROUTER identity of D's scheduler, message)


class PrefillDesk:
    """Not thread-safe; the owner holds one lock around every call. `outbox` collects what is to be sent.

    Args:
        incarnation: this life of P.
        patience_s: how long either side of a transfer may wait for the other; nothing is held meanwhile.
    """

    def __init__(self, incarnation: str, patience_s: float) -> None:
        self._incarnation = incarnation
        self._patience_s = patience_s
        self._entries: dict[TransferKey, _Entry] = {}
        self._over = Tombstones()
        self.outbox: list[Reply] = []

    # --- from D ---------------------------------------------------------------------------------------------------

    def on_message(self, peer: bytes, message: wire.ToPrefillScheduler, now: float) -> list[TransferKey]:
        """Apply D's message. Returns the transfers whose sending must stop: the owner tells the worker, or calls
        `stopped_unsent` when the worker never heard of it."""
        if isinstance(message, wire.Ready):
            self._on_ready(peer, message, now)
        elif isinstance(message, wire.Queued):
            for key in message.keys:
                entry = self._entries.get(key)
                if entry is not None:
                    entry.deadline = now + self._patience_s
        else:
            return self._on_cancel(peer, message.key)
        return []

    def _on_ready(self, peer: bytes, ready: wire.Ready, now: float) -> None:
        entry = self._entries.get(ready.key)
        reason = self._over.get(ready.key)
        if ready.incarnation != self._incarnation:
            reason = "prefill instance restarted"
        elif entry is not None and entry.state is not _State.AWAITED:
            reason = "blocks were offered twice"
        if reason is not None:
            self.outbox.append((peer, wire.Refused(ready.key, reason)))
            return
        self._entries[ready.key] = _Entry(_State.OFFERED, now + self._patience_s, peer, ready)

    def _on_cancel(self, peer: bytes, key: TransferKey) -> list[TransferKey]:
        entry = self._entries.get(key)
        if entry is not None and entry.state in (_State.SENDING, _State.STOPPING):
            entry.state = _State.STOPPING
            return [key]
        self._bury(key, "cancelled by decode")
        self.outbox.append((peer, wire.CancelAck(key)))
        return []

    # --- from P's scheduler ---------------------------------------------------------------------------------------

    def admit(
        self, key: TransferKey, prompt_tokens: int, prompt_hash: str, now: float, *, block_size: int, kv_heads: int
    ) -> Admission:
        """May this request be scheduled? Asked at every step until it is. `kv_heads`: of the model (0: MLA)."""
        entry = self._entries.get(key)
        if entry is None:
            if key in self._over:
                return Admission.ALONE
            self._entries[key] = _Entry(_State.AWAITED, now + self._patience_s)
            return Admission.WAIT
        if entry.state is _State.AWAITED:
            if now < entry.deadline:
                return Admission.WAIT
            self._bury(key, "decode did not reserve blocks in time")
            return Admission.ALONE
        if entry.state is _State.OFFERED:
            assert entry.ready is not None
            if (entry.ready.prompt_tokens, entry.ready.prompt_hash) != (prompt_tokens, prompt_hash):
                self._refuse(key, "prefill and decode tokenised different prompts")
                return Admission.ALONE
            if unlike := _unlike(entry.ready, block_size, kv_heads):
                self._refuse(key, unlike)
                return Admission.ALONE
            entry.state = _State.SENDING
        return Admission.SEND  # also for a preempted request that is admitted again

    def ready(self, key: TransferKey) -> wire.Ready | None:
        """What D offered, while the transfer is being sent."""
        entry = self._entries.get(key)
        return entry.ready if entry is not None and entry.state is _State.SENDING else None

    def fate(self, key: TransferKey) -> str | None:
        """Why a transfer is over, or None while it is not."""
        return self._over.get(key)

    def gone(self, key: TransferKey, reason: str) -> bool:
        """The request left P's scheduler early. True when its worker is sending and must be told to stop."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry.state in (_State.SENDING, _State.STOPPING):
            entry.state = _State.STOPPING
            return True
        if entry.state is _State.OFFERED:
            self._refuse(key, reason)
        else:
            self._bury(key, reason)
        return False

    def stopped_unsent(self, key: TransferKey) -> None:
        """A STOPPING transfer of which nothing was sent: acknowledge from here."""
        entry = self._entries.get(key)
        if entry is not None:
            self.outbox.append((entry.peer, wire.CancelAck(key)))
            self._bury(key, "cancelled")

    def closed(self, key: TransferKey) -> None:
        """The worker is done with it, one way or the other; D's worker knows."""
        if key in self._entries:
            self._bury(key, "transfer is over")

    def expire(self, now: float) -> None:
        """Refuse offers whose request never came. (AWAITED requests ask again by themselves.)"""
        for key, entry in list(self._entries.items()):
            if entry.state is _State.OFFERED and now >= entry.deadline:
                self._refuse(key, "prefill request did not arrive in time")

    def alive(self) -> list[Reply]:
        """Heartbeats: to each D, the transfers of its that are still held."""
        by_peer: dict[bytes, list[TransferKey]] = {}
        for key, entry in self._entries.items():
            if entry.state is not _State.AWAITED:
                by_peer.setdefault(entry.peer, []).append(key)
        return [(peer, wire.Alive(keys)) for peer, keys in by_peer.items()]

    def waiting(self) -> bool:
        """Whether a request here waits for D."""
        return any(entry.state is _State.AWAITED for entry in self._entries.values())

    def _refuse(self, key: TransferKey, reason: str) -> None:
        self.outbox.append((self._entries[key].peer, wire.Refused(key, reason)))
        self._bury(key, reason)

    def _bury(self, key: TransferKey, reason: str) -> None:
        self._entries.pop(key, None)
        self._over.add(key, reason)


def _unlike(ready: wire.Ready, block_size: int, kv_heads: int) -> str:
    """Why this offer cannot be sent to, or "". (The workers' handshake compares more, but later.)"""
    blocks = -(-ready.prompt_tokens // block_size)
    starts = range(0, ready.prompt_tokens, block_size)
    if len(ready.blocks) != blocks or ready.start_token not in starts:
        return (
            f"prefill cuts this prompt into {blocks} blocks of {block_size} tokens, decode offers {len(ready.blocks)} "
            f"from token {ready.start_token}"
        )
    try:
        heads_of(len(ready.endpoints), 0, kv_heads)
    except ValueError as error:
        return f"decode: {error}"
    return ""
