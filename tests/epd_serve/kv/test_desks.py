"""Both desks against each other: any interleaving, loss, doubling, delay, aborts, restarts and silence."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_serve import wire
from epd_serve.kv.decode_desk import LAST_WORD_S, DecodeDesk
from epd_serve.kv.prefill_desk import Admission, PrefillDesk
from epd_serve.wire import TransferKey
from tests.epd_serve.engine.kv.fakes import BLOCK_SIZE, key_of, ready

PATIENCE, SILENCE, BEAT = 50.0, 5.0, 0.5
KEYS = [key_of(str(i)) for i in range(2)]


def admit(desk: PrefillDesk, key: TransferKey, now: float = 0.0, **changes: Any) -> Admission:
    prompt = {"prompt_tokens": 10, "prompt_hash": "h", "block_size": BLOCK_SIZE, "kv_heads": 2, **changes}
    return desk.admit(key, now=now, **prompt)


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
        self.d = DecodeDesk(SILENCE, 0.0)
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


def pass_time(desk: PrefillDesk | DecodeDesk, begin: float, end: float) -> None:
    """Beats from `begin` on, the last one at `end`."""
    for number in range(int((end - begin) / BEAT)):
        desk.beat(begin + number * BEAT)
    desk.beat(end)


def p_desk() -> PrefillDesk:
    return PrefillDesk("p1", PATIENCE)


A = KEYS[0]


def test_prefill_waits_for_ready_then_sends() -> None:
    desk = p_desk()
    assert admit(desk, A) is Admission.WAIT
    assert desk.waiting()
    desk.on_message(b"d", ready(A), 1.0)
    assert admit(desk, A, 2.0) is Admission.SEND
    assert admit(desk, A, 3.0) is Admission.SEND  # preempted and back
    assert desk.ready(A) == ready(A)
    desk.beat(3.0)
    assert desk.outbox == [(b"d", wire.Alive([A]))]


@pytest.mark.parametrize(
    ("make_over", "says"),
    [
        (lambda desk: (admit(desk, A), pass_time(desk, 0, PATIENCE)), "did not reserve"),
        (lambda desk: desk.on_message(b"d", wire.Cancel(A), 0), "cancelled by decode"),
        (lambda desk: (admit(desk, A), desk.gone(A, "aborted")), "aborted"),
        (
            lambda desk: (desk.on_message(b"d", ready(A), 0), admit(desk, A), desk.gone(A, ""), desk.stopped_unsent(A)),
            "cancelled",
        ),
    ],
)
def test_a_late_ready_is_refused_with_the_reason(make_over: Callable[[PrefillDesk], Any], says: str) -> None:
    desk = p_desk()
    make_over(desk)
    desk.outbox.clear()
    desk.on_message(b"d", ready(A), 99.0)
    ((peer, refused),) = desk.outbox
    assert peer == b"d"
    assert isinstance(refused, wire.Refused)
    assert says in refused.reason
    assert desk.ready(A) is None


@pytest.mark.parametrize(
    ("offer", "says"),
    [
        ({"prompt": 9}, "different prompts"),
        ({"prompt_hash": "other"}, "different prompts"),
        ({"blocks": 2}, "decode offers 2"),
        ({"blocks": 5}, "decode offers 5"),
        ({"start_token": 3}, "from token 3"),
        ({"start_token": 12}, "from token 12"),
        ({"endpoints": ["a", "b", "c"]}, "2 KV heads cannot be shared out to tensor parallel size 3"),
        ({"endpoints": []}, "tensor parallel size 0"),
    ],
)
def test_an_offer_that_does_not_fit_the_prompt_is_refused(offer: dict[str, Any], says: str) -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A, **offer), 0)
    assert admit(desk, A) is Admission.ALONE
    assert isinstance(desk.outbox[-1][1], wire.Refused)
    assert says in desk.outbox[-1][1].reason
    assert desk.fate(A) == desk.outbox[-1][1].reason


def test_an_offer_to_another_life_is_refused() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A, incarnation="p0"), 0)
    assert desk.outbox == [(b"d", wire.Refused(A, "prefill instance restarted"))]


def test_a_second_offer_is_refused_and_the_first_stands() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0)
    desk.on_message(b"other", ready(A, source="D1:1"), 0)
    assert desk.outbox == [(b"other", wire.Refused(A, "blocks were offered twice"))]
    assert admit(desk, A) is Admission.SEND


@pytest.mark.parametrize("sending", [False, True])
def test_the_same_offer_again_is_acknowledged_wherever_it_comes_from_now(sending: bool) -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0)
    if sending:
        admit(desk, A)
    desk.on_message(b"d, connected again", ready(A), 1)
    assert desk.outbox == [(b"d, connected again", wire.Alive([A]))]
    assert admit(desk, A) is Admission.SEND


def test_queued_renews_patience() -> None:
    desk = p_desk()
    admit(desk, A)
    pass_time(desk, 0, PATIENCE - 1)
    desk.on_message(b"d", wire.Queued([A]), PATIENCE - 1)
    pass_time(desk, PATIENCE - 1, 2 * PATIENCE - 2)
    assert admit(desk, A) is Admission.WAIT
    pass_time(desk, 2 * PATIENCE - 2, 2 * PATIENCE)
    assert admit(desk, A) is Admission.ALONE


def test_an_offer_whose_request_never_comes_is_refused_in_time() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0)
    pass_time(desk, 0, PATIENCE - 1)
    assert {type(message) for _, message in desk.outbox} == {wire.Alive}
    pass_time(desk, PATIENCE - 1, PATIENCE)
    assert desk.outbox[-1] == (b"d", wire.Refused(A, "prefill request did not arrive in time"))


def test_an_offer_for_a_request_that_left_before_it_was_admitted_is_refused() -> None:
    desk = p_desk()
    assert not desk.gone(A, "client left")
    desk.on_message(b"d", ready(A), 0)
    assert desk.outbox == [(b"d", wire.Refused(A, "client left"))]


def test_decode_cancels_what_may_be_written_until_it_is_answered() -> None:
    desk = DecodeDesk(SILENCE, 0)
    desk.reserved("p", ready(A), 0)
    desk.gone(A, 0)
    desk.gone(A, 0)
    assert desk.outbox == [("p", ready(A)), ("p", wire.Cancel(A))]
    desk.beat(BEAT)
    assert desk.outbox[2:] == [("p", wire.Cancel(A))]
    assert not desk.take_failures()
    assert desk.on_message(wire.CancelAck(A), 1)
    assert not desk.on_message(wire.CancelAck(A), 1)
    assert desk.take_failures() == [A]
    assert not desk.take_failures()
    desk.beat(1.0)
    assert len(desk.outbox) == 3


def test_a_request_that_leaves_before_it_has_blocks_is_withdrawn_until_prefill_knows() -> None:
    desk = DecodeDesk(SILENCE, 0)
    desk.queued(A, "p")
    desk.gone(A, 0)
    desk.beat(BEAT)
    assert desk.outbox == [("p", wire.Cancel(A))] * 2
    desk.on_message(wire.CancelAck(A), BEAT)
    desk.beat(2 * BEAT)
    assert len(desk.outbox) == 2
    assert not desk.take_failures()


def test_an_offer_that_prefill_does_not_mention_is_made_again() -> None:
    desk = DecodeDesk(SILENCE, 0)
    desk.reserved("p", ready(A), 0)
    desk.beat(0.5)
    assert desk.outbox == [("p", ready(A))]
    desk.beat(1.0)
    assert desk.outbox == [("p", ready(A))] * 2
    desk.on_message(wire.Alive([A]), 1.1)
    desk.beat(1.5)
    assert len(desk.outbox) == 2
    desk.beat(2.0)  # over at P, and its last word was lost: P will say it again
    assert len(desk.outbox) == 3


def test_an_offer_made_again_for_what_was_sent_is_answered_that_all_is_said() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0)
    admit(desk, A)
    desk.closed(A)
    desk.on_message(b"d", ready(A), 1)
    assert desk.outbox == [(b"d", wire.CancelAck(A))]


@pytest.mark.parametrize("comes", [True, False])
def test_decode_waits_a_little_for_the_last_word_that_prefill_says_it_has_sent(comes: bool) -> None:
    desk = DecodeDesk(SILENCE, 60.0)
    desk.reserved("p", ready(A), 0)
    assert not desk.on_message(wire.CancelAck(A), 1.0)
    pass_time(desk, 1.0, 1.0 + LAST_WORD_S - BEAT)
    assert not desk.take_failures()
    if comes:
        desk.closed(A)
    pass_time(desk, 1.0 + LAST_WORD_S - BEAT, 1.0 + LAST_WORD_S)
    assert desk.take_failures() == ([] if comes else [A])


def test_nobody_waits_for_the_last_word_of_what_nobody_wants() -> None:
    desk = DecodeDesk(SILENCE, 60.0)
    desk.reserved("p", ready(A), 0)
    desk.on_message(wire.CancelAck(A), 1.0)
    desk.gone(A, 1.0)
    assert desk.take_failures() == [A]
    assert desk.outbox == [("p", ready(A))]


def test_a_cancel_while_sending_is_left_to_the_worker_to_acknowledge() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0)
    admit(desk, A)
    assert desk.on_message(b"d", wire.Cancel(A), 1) == [A]
    assert desk.on_message(b"d", wire.Cancel(A), 1) == []  # said again: the owner knows
    assert not desk.outbox
    assert desk.ready(A) is None
    desk.closed(A)
    assert not desk.outbox
    desk.on_message(b"d", wire.Cancel(A), 2)
    assert desk.outbox == [(b"d", wire.CancelAck(A))]


def test_heartbeats_renew_decodes_deadline_and_quarantine_extends_it() -> None:
    desk = DecodeDesk(SILENCE, 7.0)
    desk.reserved("p", ready(A), 0)
    pass_time(desk, 0, 4)
    desk.on_message(wire.Alive([A, KEYS[1]]), 4)
    pass_time(desk, 4, 4 + SILENCE)
    assert desk.outbox[-1] == ("p", wire.Cancel(A))  # should P come round, it need not go on
    pass_time(desk, 4 + SILENCE, 4 + SILENCE + 6.5)
    assert not desk.take_failures()
    pass_time(desk, 4 + SILENCE + 6.5, 4 + SILENCE + 7)
    assert desk.take_failures() == [A]


def test_a_prefill_that_comes_round_in_quarantine_ends_it() -> None:
    desk = DecodeDesk(SILENCE, 60.0)
    desk.reserved("p", ready(A), 0)
    pass_time(desk, 0, SILENCE)
    desk.on_message(wire.Alive([A]), SILENCE)
    pass_time(desk, SILENCE, 2 * SILENCE + 59)  # silent once more, from the beginning
    assert not desk.take_failures()
    desk.on_message(wire.CancelAck(A), 2 * SILENCE + 59)
    assert desk.take_failures() == [A]


def test_time_in_which_decode_itself_was_stopped_is_no_silence() -> None:
    desk = DecodeDesk(SILENCE, 0)
    desk.reserved("p", ready(A), 0)
    desk.beat(BEAT)
    pass_time(desk, 1000.0, 1000.0 + SILENCE - 3.0)
    assert not desk.take_failures()
    pass_time(desk, 1000.0 + SILENCE - 3.0, 1000.0 + SILENCE)
    assert desk.take_failures() == [A]
