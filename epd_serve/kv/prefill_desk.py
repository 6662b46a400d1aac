"""P's scheduler side of transfers: who may be admitted, and what D is told. Pure state, no sockets, no vLLM.

States and events: `epd_serve.kv.lifecycle`. P admits what D has reserved for, so P's blocks drain; and one request at
a time ahead of that, whose KV waits in P's blocks until D has some (`docs/waiting.md`). In SENDING and STOPPING the
worker has the last word: its DONE to D's worker follows every write, so it is also the acknowledgement of a cancel.
What D says of a transfer that is over is answered from its tombstone, as often as D says it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from epd_serve import wire
from epd_serve.kv.heads import heads_of
from epd_serve.kv.lease import Leases
from epd_serve.kv.lifecycle import PREFILL, AtPrefill, Prefill, Tombstones
from epd_serve.wire import TransferKey

AHEAD_S = 10.0
"""How long D may say nothing of a request that is ahead. It was called when P was; where the answer has ended with P's
token it was left again, maybe before its scheduler knew of the request, and then nobody asks for the KV any more."""

_CLOSED = "transfer is over"  # the fate of what workers have sent; all other fates were decided here


class Admission(enum.Enum):
    WAIT = "wait"  # D has not reserved yet
    SEND = "send"  # run it and push its KV
    ALONE = "alone"  # run it (vLLM offers no way to fail it here), push nothing


@dataclass(frozen=True)
class PromptShape:
    """What D's offer for a prompt must fit.

    Attributes:
        tokens, digest: of the prompt (`epd_serve.kv.params.prompt_hash`).
        block_size: P's, tokens. kv_heads: of the model (0: MLA).
    """

    tokens: int
    digest: str
    block_size: int
    kv_heads: int

    def unlike(self, ready: wire.Ready) -> str:
        """Why this offer cannot be sent to, or "". (The workers' handshake compares more, but later.)"""
        if (ready.prompt_tokens, ready.prompt_hash) != (self.tokens, self.digest):
            return "prefill and decode tokenised different prompts"
        blocks = -(-ready.prompt_tokens // self.block_size)
        starts = range(0, ready.prompt_tokens, self.block_size)
        if len(ready.blocks) != blocks or ready.start_token not in starts:
            return (
                f"prefill cuts this prompt into {blocks} blocks of {self.block_size} tokens, decode offers "
                f"{len(ready.blocks)} from token {ready.start_token}"
            )
        try:
            heads_of(len(ready.endpoints), 0, self.kv_heads)
        except ValueError as error:
            return f"decode: {error}"
        return ""


@dataclass
class _Entry:
    state: Prefill
    peer: bytes = b""
    ready: wire.Ready | None = None
    token: int | None = None  # the first one, once it is sampled
    prompt: PromptShape | None = None  # of a request that went ahead


Reply = tuple[bytes, wire.ToDecodeScheduler]  # (ROUTER identity of D's scheduler, message)


class PrefillDesk:
    """Not thread-safe; the owner holds one lock around every call. `outbox` collects what is to be sent.

    Args:
        incarnation: this life of P.
        patience_s: how long either side of a transfer may wait for the other; nothing is held meanwhile, but for one
            that is ahead (`AHEAD_S`).
    """

    def __init__(self, incarnation: str, patience_s: float) -> None:
        self._incarnation = incarnation
        self._patience_s = patience_s
        self._entries: dict[TransferKey, _Entry] = {}
        self._leases = Leases()
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
                if self._state(key) in (Prefill.AWAITED, Prefill.AHEAD):
                    self._grant(key, now)
        elif self._on_cancel(peer, message.key):
            return [message.key]
        return []

    def _on_ready(self, peer: bytes, ready: wire.Ready, now: float) -> None:
        entry = self._entries.get(ready.key)
        if ready.incarnation != self._incarnation:
            self._refuse(peer, ready.key, "prefill instance restarted")
        elif entry is not None and entry.ready is not None and entry.ready != ready:
            self._refuse(peer, ready.key, "blocks were offered twice")
        elif entry is not None and entry.ready is not None:  # said again: D has not heard of it for a while
            self._go(ready.key, AtPrefill.READY)
            entry.peer = peer
            self._say_token(peer, ready.key, entry.token)
            self.outbox.append((peer, wire.Alive([ready.key])))
        elif entry is not None and entry.prompt is not None:
            self._offered_late(entry, entry.prompt, peer, ready)
        elif self._go(ready.key, AtPrefill.READY) is Prefill.OVER:
            reason = self._over.get(ready.key) or ""
            if reason == _CLOSED:
                self.outbox.append((peer, wire.CancelAck(ready.key, self._over.token(ready.key))))
            else:
                self._refuse(peer, ready.key, reason)
        else:
            self._entries[ready.key] = _Entry(Prefill.OFFERED, peer, ready)
            self._leases.grant(ready.key, now + self._patience_s)

    def _offered_late(self, entry: _Entry, prompt: PromptShape, peer: bytes, ready: wire.Ready) -> None:
        """D has blocks for a request that is ahead."""
        if reason := prompt.unlike(ready):
            self._go(ready.key, AtPrefill.UNFIT, reason)
            self._refuse(peer, ready.key, reason)
        else:
            entry.peer, entry.ready = peer, ready
            self._leases.end(ready.key)
            self._go(ready.key, AtPrefill.READY)
            self._say_token(peer, ready.key, entry.token)

    def _on_cancel(self, peer: bytes, key: TransferKey) -> bool:
        """Whether this is news to the owner."""
        former = self._state(key)
        if self._go(key, AtPrefill.CANCEL, "cancelled by decode") is Prefill.OVER:
            self.outbox.append((peer, wire.CancelAck(key)))
        return former is Prefill.SENDING

    # --- from P's scheduler ---------------------------------------------------------------------------------------

    def admit(self, key: TransferKey, prompt: PromptShape, now: float, *, ahead: bool = False) -> Admission:
        """May this request be scheduled? Asked at every step until it is. `ahead`: it may before D has blocks, too."""
        state = self._state(key)
        if state in (Prefill.UNKNOWN, Prefill.AWAITED, Prefill.OVER):
            if self._go(key, AtPrefill.ASKED) is Prefill.OVER:
                return Admission.ALONE
            if state is Prefill.UNKNOWN:
                self._leases.grant(key, now + self._patience_s)
            if not ahead:
                return Admission.WAIT
            self._go(key, AtPrefill.BEGUN)
            self._grant(key, now)
            self._entries[key].prompt = prompt
            return Admission.SEND
        if state is Prefill.OFFERED:
            entry = self._entries[key]
            assert entry.ready is not None
            if reason := prompt.unlike(entry.ready):
                self._go(key, AtPrefill.UNFIT, reason)
                self._refuse(entry.peer, key, reason)
                return Admission.ALONE
            self._leases.end(key)
        self._go(key, AtPrefill.ADMITTED)
        return Admission.SEND  # also for a preempted request that is admitted again

    def someone_ahead(self) -> bool:
        """Whether a request here holds blocks for which D has none yet."""
        return any(entry.state is Prefill.AHEAD for entry in self._entries.values())

    def is_wanted(self, key: TransferKey) -> bool:
        """Whether what this request computes is to be sent, now or once D has blocks."""
        return self._state(key) in (Prefill.AHEAD, Prefill.SENDING)

    def ready(self, key: TransferKey) -> wire.Ready | None:
        """What D offered, while the transfer is being sent."""
        entry = self._entries.get(key)
        return entry.ready if entry is not None and entry.state is Prefill.SENDING else None

    def fate(self, key: TransferKey) -> str | None:
        """Why a transfer is over, or None while it is not."""
        return self._over.get(key)

    def sampled(self, key: TransferKey, token: int) -> None:
        """The request's first token, before the request leaves. D goes on after it."""
        entry = self._entries.get(key)
        state = self._go(key, AtPrefill.SAMPLED)
        if state in (Prefill.AHEAD, Prefill.SENDING):
            assert entry is not None
            entry.token = token
        if state is Prefill.SENDING:
            assert entry is not None
            self._say_token(entry.peer, key, token)

    def gone(self, key: TransferKey, reason: str) -> bool:
        """The request left P's scheduler early. True when its worker is sending and must be told to stop."""
        entry = self._entries.get(key)
        offered = entry is not None and entry.state is Prefill.OFFERED
        state = self._go(key, AtPrefill.LEFT, reason)
        if entry is not None and offered:
            self._refuse(entry.peer, key, reason)
        return state is Prefill.STOPPING

    def stopped_unsent(self, key: TransferKey) -> None:
        """A STOPPING transfer of which nothing was sent: acknowledge from here."""
        entry = self._entries.get(key)
        if entry is not None:  # the request may have left between the cancel and the owner's look at it
            self._go(key, AtPrefill.UNSENT, "cancelled")
            self.outbox.append((entry.peer, wire.CancelAck(key)))

    def closed(self, key: TransferKey) -> None:
        """The worker is done with it, one way or the other; D's worker knows, unless the link broke."""
        self._go(key, AtPrefill.CLOSED, _CLOSED)

    # --- time -----------------------------------------------------------------------------------------------------

    def beat(self, now: float) -> None:
        """To be called regularly: patience that is over, and the heartbeats to each D.

        They speak for the workers as well, without asking them: one whose link hangs ends its process, and with it
        this one, so no transfer is listed for ever.
        """
        for key in self._leases.lapsed(now):
            entry = self._entries[key]
            if entry.state is Prefill.OFFERED:
                self._refuse(entry.peer, key, "prefill request did not arrive in time")
                self._go(key, AtPrefill.LAPSED, "prefill request did not arrive in time")
            else:
                self._go(key, AtPrefill.LAPSED, "decode did not reserve blocks in time")
        by_peer: dict[bytes, list[TransferKey]] = {}
        for key, entry in self._entries.items():
            if entry.ready is not None:
                by_peer.setdefault(entry.peer, []).append(key)
                self._say_token(entry.peer, key, entry.token)
        self.outbox += [(peer, wire.Alive(keys)) for peer, keys in by_peer.items()]

    def waiting(self) -> bool:
        """Whether a request here waits for D."""
        return any(entry.state is Prefill.AWAITED for entry in self._entries.values())

    # --- the table ------------------------------------------------------------------------------------------------

    def _state(self, key: TransferKey) -> Prefill:
        if key in self._entries:
            return self._entries[key].state
        return Prefill.OVER if key in self._over else Prefill.UNKNOWN

    def _go(self, key: TransferKey, event: AtPrefill, reason: str = "") -> Prefill:
        """Apply an event; `reason` is what the tombstone says where it ends the transfer."""
        former = self._state(key)
        state = PREFILL.after(former, event)
        if state is not Prefill.OVER:
            self._entries.setdefault(key, _Entry(state)).state = state
        elif former is not Prefill.OVER:
            entry = self._entries.pop(key, None)
            self._leases.end(key)
            self._over.add(key, reason, entry.token if entry is not None else None)
        return state

    def _grant(self, key: TransferKey, now: float) -> None:
        """Time for D to say something of it."""
        ahead = self._state(key) is Prefill.AHEAD
        self._leases.grant(key, now + (min(AHEAD_S, self._patience_s) if ahead else self._patience_s))

    def _say_token(self, peer: bytes, key: TransferKey, token: int | None) -> None:
        if token is not None:
            self.outbox.append((peer, wire.FirstToken(key, token)))

    def _refuse(self, peer: bytes, key: TransferKey, reason: str) -> None:
        self.outbox.append((peer, wire.Refused(key, reason)))
