"""Decode's desk, step by step: what it says again, whom it waits for, and when it gives blocks back."""

from __future__ import annotations

import pytest

from epd_serve import wire
from epd_serve.kv.decode_desk import LAST_WORD_S, DecodeDesk
from tests.epd_serve.engine.kv.fakes import ready
from tests.epd_serve.kv.desk_steps import BEAT, KEYS, SILENCE, A, pass_time


def test_decode_cancels_what_may_be_written_until_it_is_answered() -> None:
    desk = DecodeDesk(SILENCE)
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
    desk = DecodeDesk(SILENCE)
    desk.queued(A, "p")
    desk.gone(A, 0)
    desk.beat(BEAT)
    assert desk.outbox == [("p", wire.Cancel(A))] * 2
    desk.on_message(wire.CancelAck(A), BEAT)
    desk.beat(2 * BEAT)
    assert len(desk.outbox) == 2
    assert not desk.take_failures()


def test_an_offer_that_prefill_does_not_mention_is_made_again() -> None:
    desk = DecodeDesk(SILENCE)
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


@pytest.mark.parametrize("comes", [True, False])
def test_decode_waits_a_little_for_the_last_word_that_prefill_says_it_has_sent(comes: bool) -> None:
    desk = DecodeDesk(SILENCE, lambda endpoint: 60.0)
    desk.reserved("p", ready(A), 0)
    assert not desk.on_message(wire.CancelAck(A), 1.0)
    pass_time(desk, 1.0, 1.0 + LAST_WORD_S - BEAT)
    assert not desk.take_failures()
    if comes:
        desk.closed(A)
    pass_time(desk, 1.0 + LAST_WORD_S - BEAT, 1.0 + LAST_WORD_S)
    assert desk.take_failures() == ([] if comes else [A])


def test_nobody_waits_for_the_last_word_of_what_nobody_wants() -> None:
    desk = DecodeDesk(SILENCE, lambda endpoint: 60.0)
    desk.reserved("p", ready(A), 0)
    desk.on_message(wire.CancelAck(A), 1.0)
    desk.gone(A, 1.0)
    assert desk.take_failures() == [A]
    assert desk.outbox == [("p", ready(A))]


def test_heartbeats_renew_decodes_deadline_and_quarantine_extends_it() -> None:
    desk = DecodeDesk(SILENCE, lambda endpoint: 7.0)
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
    desk = DecodeDesk(SILENCE, lambda endpoint: 60.0)
    desk.reserved("p", ready(A), 0)
    pass_time(desk, 0, SILENCE)
    desk.on_message(wire.Alive([A]), SILENCE)
    pass_time(desk, SILENCE, 2 * SILENCE + 59)  # silent once more, from the beginning
    assert not desk.take_failures()
    desk.on_message(wire.CancelAck(A), 2 * SILENCE + 59)
    assert desk.take_failures() == [A]


def test_time_in_which_decode_itself_was_stopped_is_no_silence() -> None:
    desk = DecodeDesk(SILENCE)
    desk.reserved("p", ready(A), 0)
    desk.beat(BEAT)
    pass_time(desk, 1000.0, 1000.0 + SILENCE - 3.0)
    assert not desk.take_failures()
    pass_time(desk, 1000.0 + SILENCE - 3.0, 1000.0 + SILENCE)
    assert desk.take_failures() == [A]


@pytest.mark.parametrize("said", [wire.FirstToken(A, 7), wire.CancelAck(A, 7)])
def test_the_first_token_is_handed_on_once_to_scheduler_and_workers(said: wire.ToDecodeScheduler) -> None:
    desk = DecodeDesk(SILENCE)
    desk.reserved("p", ready(A, endpoints=["w0", "w1"]), 0)
    desk.outbox.clear()
    for _ in range(2):
        assert not desk.on_message(said, 1.0)
    assert desk.take_tokens() == [(A, 7)] and desk.take_tokens() == []
    assert desk.outbox == [("w0", wire.FirstToken(A, 7)), ("w1", wire.FirstToken(A, 7))]


def test_a_first_token_of_what_nobody_waits_for_is_nobodys() -> None:
    desk = DecodeDesk(SILENCE)
    desk.on_message(wire.FirstToken(A, 7), 0)
    desk.queued(KEYS[1], "p")
    desk.on_message(wire.FirstToken(KEYS[1], 7), 0)
    assert desk.take_tokens() == [] and desk.outbox == []


def test_prefill_that_is_over_without_a_first_token_fails_the_transfer() -> None:
    desk = DecodeDesk(SILENCE, lambda endpoint: 60.0)
    desk.reserved("p", ready(A), 0)
    desk.on_message(wire.CancelAck(A), 1.0)
    pass_time(desk, 1.0, 1.0 + LAST_WORD_S)
    assert desk.take_failures() == [A] and desk.take_tokens() == []
