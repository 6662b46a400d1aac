"""Both desks against each other: any interleaving, loss, doubling, delay, aborts, restarts and silence."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_serve import wire
from epd_serve.kv.decode_desk import DecodeDesk
from epd_serve.kv.prefill_desk import Admission, PrefillDesk
from epd_serve.wire import TransferKey
from tests.epd_serve.engine.kv.fakes import ready
from tests.epd_serve.kv.desk_steps import BEAT, KEYS, PATIENCE, SILENCE, admit


class Desks(RuleBasedStateMachine):
    """One P and one D. Control messages may be lost, doubled, overtaken, and held back for as long as it takes. The P
    worker is modelled by the set of transfers it writes for, D's by what it was told and reported; a restart of P loses
    what was on its way between the workers."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.life = 0
        self.to_p: list[wire.ToPrefillScheduler] = []
        self.to_d: list[wire.ToDecodeScheduler] = []
        self.late: list[tuple[list[Any], Any]] = []  # (to whom, message)
        self.data: deque[tuple[TransferKey, bool]] = deque()  # DONE from P's worker to D's
        self.silent_beats = 0  # of which nothing arrived
        self.d = DecodeDesk(SILENCE)
        self.held: set[TransferKey] = set()  # D's reserved blocks
        self.asked: set[TransferKey] = set()
        self.done_at_d: dict[TransferKey, bool] = {}  # arrived, not reported yet
        self.reports: dict[TransferKey, str] = {}
        self.dropped: set[TransferKey] = set()  # given up for silence: D's worker refuses its packets
        self.gone_at_d: set[TransferKey] = set()
        self._start_p()

    def _start_p(self) -> None:
        self.p = PrefillDesk(f"p{self.life}", PATIENCE)
        self.writing: set[TransferKey] = set()
        self.admitted: set[TransferKey] = set()
        self.left_p: set[TransferKey] = set()

    def _collect(self) -> None:
        self.to_p.extend(message for _, message in self.d.outbox)
        self.d.outbox.clear()
        self.to_d.extend(message for _, message in self.p.outbox)
        self.p.outbox.clear()

    def _stop(self, keys: list[TransferKey]) -> None:
        for key in keys:
            if key in self.writing:
                self._worker_closes(key, ok=False)
            else:
                self.p.stopped_unsent(key)
        self._collect()

    def _worker_closes(self, key: TransferKey, *, ok: bool) -> None:
        self.writing.discard(key)
        self.data.append((key, ok))
        self.p.closed(key)

    # --- D --------------------------------------------------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS))
    def queued(self, key: TransferKey) -> None:
        if key not in self.asked and key not in self.gone_at_d:
            self.d.queued(key, "p")

    @rule(key=st.sampled_from(KEYS))
    def reserve(self, key: TransferKey) -> None:
        if key not in self.asked and key not in self.gone_at_d:
            self.asked.add(key)
            self.held.add(key)
            self.d.reserved("p", ready(key, incarnation=f"p{self.life}"), self.now)
            self._collect()

    @rule(key=st.sampled_from(KEYS))
    def decode_request_leaves(self, key: TransferKey) -> None:
        self.gone_at_d.add(key)
        self.d.gone(key, self.now)
        self._collect()

    @rule()
    def decode_step(self) -> None:
        for key in self.d.take_failures():
            assert key in self.asked
            if key in self.held and key not in self.done_at_d:
                self.done_at_d[key] = False
        for key, ok in list(self.done_at_d.items()):
            del self.done_at_d[key]
            assert key not in self.reports  # exactly once
            self.reports[key] = "received" if ok else "failed"
            self.held.discard(key)
            self.d.closed(key)

    @rule()
    def done_arrives(self) -> None:
        if self.data:
            key, ok = self.data.popleft()
            if key in self.held:
                self.done_at_d.setdefault(key, ok)

    # --- P --------------------------------------------------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS))
    def prefill_asks(self, key: TransferKey) -> None:
        if key in self.left_p or key in self.admitted:
            return
        admission = admit(self.p, key, self.now)
        if admission is Admission.SEND:
            self.admitted.add(key)
        elif admission is Admission.ALONE:
            self.left_p.add(key)
        self._collect()

    @rule(key=st.sampled_from(KEYS))
    def prefill_writes(self, key: TransferKey) -> None:
        if key in self.admitted and self.p.ready(key) is not None:
            assert key in self.held or key in self.dropped  # only what D reserved
            self.writing.add(key)

    @rule(key=st.sampled_from(KEYS))
    def prefill_starts(self, key: TransferKey) -> None:
        """The usual way to a transfer on its way, in one go."""
        self.reserve(key)
        while self.to_p:
            self._prefill_hears(self.to_p.pop(0))
        self.prefill_asks(key)
        self.prefill_writes(key)

    @rule(key=st.sampled_from(KEYS))
    def prefill_completes(self, key: TransferKey) -> None:
        if key in self.writing:
            self.admitted.discard(key)
            self.left_p.add(key)
            self._worker_closes(key, ok=True)

    @rule(key=st.sampled_from(KEYS))
    def prefill_request_aborts(self, key: TransferKey) -> None:
        if key in self.left_p:
            return
        self.left_p.add(key)
        self.admitted.discard(key)
        if self.p.gone(key, "aborted"):
            self._stop([key])
        self._collect()

    @rule(dice=st.integers(0, 9), kept=st.booleans())  # rarely, or nothing gets far
    def prefill_restarts(self, dice: int, kept: bool) -> None:
        if dice != 9:
            return
        self.life += 1
        if not kept:
            self.to_p.clear()
            self.to_d.clear()
        self.data.clear()
        self._start_p()

    # --- control messages -----------------------------------------------------------------------------------------

    def _prefill_hears(self, message: wire.ToPrefillScheduler) -> None:
        self._stop(self.p.on_message(b"d", message, self.now))
        self._collect()

    def _decode_hears(self, message: wire.ToDecodeScheduler) -> None:
        if isinstance(message, wire.CancelAck | wire.Refused):
            assert message.key not in self.writing, "P said that it does not write"
        self.d.on_message(message, self.now)

    def _channel(self, to_p: bool) -> list[Any]:
        return self.to_p if to_p else self.to_d

    @rule(to_p=st.booleans(), which=st.integers(0, 3))
    def a_message_arrives(self, to_p: bool, which: int) -> None:
        channel = self._channel(to_p)
        if channel:
            message = channel.pop(min(which, len(channel) - 1))
            self._prefill_hears(message) if to_p else self._decode_hears(message)

    @rule(to_p=st.booleans(), which=st.integers(0, 3), fate=st.sampled_from(["lost", "doubled", "late"]))
    def a_message_goes_astray(self, to_p: bool, which: int, fate: str) -> None:
        channel = self._channel(to_p)
        if not channel:
            return
        which = min(which, len(channel) - 1)
        if fate == "doubled":
            channel.append(channel[which])
            return
        message = channel.pop(which)
        if fate == "late":
            self.late.append((channel, message))

    @rule(which=st.integers(0, 3))
    def a_late_message_arrives(self, which: int) -> None:
        if self.late:
            channel, message = self.late.pop(min(which, len(self.late) - 1))
            self._prefill_hears(message) if channel is self.to_p else self._decode_hears(message)

    # --- time -----------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self.now += BEAT
        self.p.beat(self.now)
        former = set(self.d._failures)
        self.d.beat(self.now)
        self.dropped |= set(self.d._failures) - former
        self._collect()

    @rule(lost=st.booleans())
    def beat(self, lost: bool) -> None:
        """All that is under way arrives, or none of it. Silence as long as the deadline means that P is gone."""
        self._beat()
        lost = lost and (self.silent_beats + 2) * BEAT < SILENCE
        if lost:
            self.to_p.clear()
            self.to_d.clear()
        self.silent_beats = self.silent_beats + 1 if lost else 0
        self._deliver()

    @rule(dice=st.integers(0, 4))
    def a_minute_passes(self, dice: int) -> None:
        if dice == 4:
            for _ in range(120):
                self.beat(False)

    def _deliver(self) -> None:
        while self.to_p or self.to_d or self.data:
            self.a_message_arrives(True, 0)
            self.done_arrives()
            self.a_message_arrives(False, 0)

    # --- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_written_to_blocks_that_were_given_back(self) -> None:
        assert not self.writing & set(self.reports) - self.dropped, "P writes for a transfer whose blocks D gave back"

    def teardown(self) -> None:
        """Once messages arrive, what both ends want is over long before anybody's patience. Then all requests leave."""
        for _ in range(5):
            for key in KEYS:
                self.prefill_asks(key)
                self.prefill_writes(key)
                self.prefill_completes(key)
            self.beat(False)
            self.decode_step()
        assert not self.held
        for key in KEYS:
            self.prefill_request_aborts(key)
            self.decode_request_leaves(key)
        for _ in range(5):
            self.beat(False)
            self.decode_step()
        assert set(self.reports) == self.asked
        assert not self.d._entries
        assert not self.d._leases.until
        assert not self.p._entries
        assert not self.p._leases.until


TestDesks = Desks.TestCase
TestDesks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestDesksForLong(Desks.TestCase):
    settings = settings(max_examples=600, stateful_step_count=40, deadline=None)
