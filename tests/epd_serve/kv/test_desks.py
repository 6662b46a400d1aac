"""Both desks against each other: any interleaving, any delay, aborts, restarts and silence."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve import wire
from epd_serve.kv.decode_desk import DecodeDesk
from epd_serve.kv.prefill_desk import Admission, PrefillDesk
from epd_serve.wire import TransferKey
from tests.epd_serve.engine.kv.fakes import BLOCK_SIZE, key_of, ready

PATIENCE, SILENCE = 50.0, 5.0
KEYS = [key_of(str(i)) for i in range(2)]


def admit(desk: PrefillDesk, key: TransferKey, now: float = 0.0, **changes: Any) -> Admission:
    prompt = {"prompt_tokens": 10, "prompt_hash": "h", "block_size": BLOCK_SIZE, "kv_heads": 2, **changes}
    return desk.admit(key, now=now, **prompt)


class Desks(RuleBasedStateMachine):
    """One P and one D. Channels keep order and lose nothing, except that a restart of P loses what was on its way to it
    or from it. The P worker is modelled by the set of transfers it writes for, D's by what it was told and reported."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.life = 0
        self.to_p: deque[Any] = deque()
        self.to_d: deque[Any] = deque()
        self.data: deque[tuple[TransferKey, bool]] = deque()  # DONE from P's worker to D's
        self.d = DecodeDesk(SILENCE, 0.0)
        self.held: set[TransferKey] = set()  # D's reserved blocks
        self.asked: set[TransferKey] = set()
        self.done_at_d: dict[TransferKey, bool] = {}  # arrived, not reported yet
        self.reports: dict[TransferKey, str] = {}
        self.dropped: set[TransferKey] = set()  # D's worker refuses packets: given up after silence
        self.gone_at_d: set[TransferKey] = set()
        self._start_p()

    def _start_p(self) -> None:
        self.p = PrefillDesk(f"p{self.life}", PATIENCE)
        self.writing: set[TransferKey] = set()
        self.admitted: set[TransferKey] = set()
        self.left_p: set[TransferKey] = set()
        self.p_lost = False

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
        self.d.gone(key)
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
            self.dropped.add(key)
            self.held.discard(key)
            self.d.closed(key)

    @precondition(lambda self: self.to_d)
    @rule()
    def decode_hears(self) -> None:
        message = self.to_d.popleft()
        if isinstance(message, wire.CancelAck | wire.Refused):
            assert message.key not in self.writing, "blocks given back while P writes to them"
        self.d.on_message(message, self.now)

    @precondition(lambda self: self.data)
    @rule()
    def done_arrives(self) -> None:
        key, ok = self.data.popleft()
        if key in self.held:
            self.done_at_d.setdefault(key, ok)

    # --- P --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.to_p)
    @rule()
    def prefill_hears(self) -> None:
        self._stop(self.p.on_message(b"d", self.to_p.popleft(), self.now))
        self._collect()

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
            self.prefill_hears()
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

    @rule(dice=st.integers(0, 9))  # rarely, or nothing gets far
    def prefill_restarts(self, dice: int) -> None:
        if dice != 9:
            return
        self.life += 1
        self.to_p.clear()
        self.to_d.clear()
        self.data.clear()
        self._start_p()

    # --- time -----------------------------------------------------------------------------------------------------

    @rule()
    def beat(self) -> None:
        self.p.expire(self.now)
        self.p.outbox += self.p.alive()
        self.d.outbox += self.d.still_queued()
        self._collect()

    @rule(seconds=st.sampled_from([0.5, 60.0]), dice=st.integers(0, 4))
    def time_may_pass(self, seconds: float, dice: int) -> None:
        if dice == 4:
            self.time_passes(seconds)

    def time_passes(self, seconds: float) -> None:
        """Channels deliver within a beat: silence as long as the deadline means that P is gone."""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self.beat()
            self._deliver()
        self.d.expire(self.now)

    def _deliver(self) -> None:
        while self.to_p or self.to_d or self.data:
            for ready_to_run, action in (
                (self.to_p, self.prefill_hears),
                (self.data, self.done_arrives),
                (self.to_d, self.decode_hears),
            ):
                if ready_to_run:
                    action()

    # --- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_written_to_blocks_that_were_given_back(self) -> None:
        assert not self.writing & set(self.reports), "P writes for a transfer whose blocks D gave back"

    def teardown(self) -> None:
        """Everything ends once all requests have left and time passes."""
        for key in KEYS:
            self.prefill_request_aborts(key)
            self.decode_request_leaves(key)
        for _ in range(3):
            self.time_passes(60.0)
            self.decode_step()
        assert not self.held
        assert set(self.reports) == self.asked
        assert not self.d._entries
        assert not self.p._entries


TestDesks = Desks.TestCase
TestDesks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestDesksForLong(Desks.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


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
    assert desk.alive() == [(b"d", wire.Alive([A]))]


@pytest.mark.parametrize(
    ("make_over", "says"),
    [
        (lambda desk: (admit(desk, A), admit(desk, A, PATIENCE)), "did not reserve"),
        (lambda desk: desk.on_message(b"d", wire.Cancel(A), 0), "cancelled by decode"),
        (lambda desk: (admit(desk, A), desk.gone(A, "aborted")), "aborted"),
        (lambda desk: (desk.on_message(b"d", ready(A), 0), admit(desk, A), desk.closed(A)), "is over"),
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
    desk.on_message(b"other", ready(A), 0)
    assert desk.outbox == [(b"other", wire.Refused(A, "blocks were offered twice"))]
    assert admit(desk, A) is Admission.SEND


def test_queued_renews_patience() -> None:
    desk = p_desk()
    admit(desk, A)
    desk.on_message(b"d", wire.Queued([A]), PATIENCE - 1)
    assert admit(desk, A, PATIENCE + 1) is Admission.WAIT
    assert admit(desk, A, 2 * PATIENCE) is Admission.ALONE


def test_an_offer_whose_request_never_comes_is_refused_in_time() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0)
    desk.expire(PATIENCE - 1)
    assert not desk.outbox
    desk.expire(PATIENCE)
    assert isinstance(desk.outbox[0][1], wire.Refused)


def test_decode_cancels_only_what_may_be_written() -> None:
    desk = DecodeDesk(SILENCE, 0)
    desk.reserved("p", ready(A), 0)
    desk.gone(A)
    desk.gone(A)
    assert desk.outbox == [("p", ready(A)), ("p", wire.Cancel(A))]
    assert not desk.take_failures()
    desk.on_message(wire.CancelAck(A), 1)
    assert desk.take_failures() == [A]
    assert not desk.take_failures()


def test_a_cancel_while_sending_is_left_to_the_worker_to_acknowledge() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0)
    admit(desk, A)
    assert desk.on_message(b"d", wire.Cancel(A), 1) == [A]
    assert not desk.outbox
    assert desk.ready(A) is None
    desk.closed(A)
    assert not desk.outbox


def test_heartbeats_renew_decodes_deadline_and_quarantine_extends_it() -> None:
    desk = DecodeDesk(SILENCE, 7.0)
    desk.reserved("p", ready(A), 0)
    desk.on_message(wire.Alive([A, KEYS[1]]), 4)
    desk.expire(4 + SILENCE + 7 - 0.1)
    assert not desk.take_failures()
    desk.expire(4 + SILENCE + 7)
    assert desk.take_failures() == [A]
