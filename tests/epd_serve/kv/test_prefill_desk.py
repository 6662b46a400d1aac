"""Prefill's desk, step by step: which offer it takes, which it refuses and why, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from epd_serve import wire
from epd_serve.kv.prefill_desk import AHEAD_S, Admission, PrefillDesk
from tests.epd_serve.engine.kv.fakes import ready
from tests.epd_serve.kv.desk_steps import BEAT, PATIENCE, A, admit, pass_time


def p_desk() -> PrefillDesk:
    return PrefillDesk("p1", PATIENCE)


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


def test_an_offer_made_again_for_what_was_sent_is_answered_that_all_is_said() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0)
    admit(desk, A)
    desk.closed(A)
    desk.on_message(b"d", ready(A), 1)
    assert desk.outbox == [(b"d", wire.CancelAck(A))]


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


def test_the_first_token_is_said_at_once_with_every_beat_and_when_asked_again() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0)
    admit(desk, A)
    desk.sampled(A, 7)
    assert desk.outbox == [(b"d", wire.FirstToken(A, 7))]
    desk.outbox.clear()
    desk.beat(BEAT)
    assert desk.outbox == [(b"d", wire.FirstToken(A, 7)), (b"d", wire.Alive([A]))]
    desk.outbox.clear()
    desk.on_message(b"d", ready(A), 1)
    assert desk.outbox == [(b"d", wire.FirstToken(A, 7)), (b"d", wire.Alive([A]))]
    desk.outbox.clear()
    desk.closed(A)
    desk.on_message(b"d", ready(A), 2)
    assert desk.outbox == [(b"d", wire.CancelAck(A, 7))]


def test_nobody_is_told_the_first_token_of_what_was_never_sent() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0)
    admit(desk, A)
    desk.on_message(b"d", wire.Cancel(A), 1)
    desk.sampled(A, 7)
    desk.closed(A)
    desk.sampled(A, 7)
    assert not [one for one in desk.outbox if isinstance(one[1], wire.FirstToken)]


def test_a_request_may_go_ahead_of_decode_and_is_sent_once_there_is_an_offer() -> None:
    desk = p_desk()
    assert admit(desk, A, ahead=True) is Admission.SEND
    assert desk.someone_ahead() and desk.is_wanted(A) and desk.ready(A) is None
    desk.beat(1.0)
    assert desk.outbox == []  # nobody to say it to
    desk.sampled(A, 7)
    desk.on_message(b"d", ready(A), 2.0)
    assert desk.outbox == [(b"d", wire.FirstToken(A, 7))]
    assert desk.ready(A) == ready(A) and not desk.someone_ahead()
    pass_time(desk, 2, 2 * PATIENCE)
    assert desk.is_wanted(A)


def test_what_is_ahead_is_given_up_when_decode_is_silent_for_too_long() -> None:
    desk = PrefillDesk("p", patience_s=300.0)
    admit(desk, A, ahead=True)
    pass_time(desk, 0, AHEAD_S - 1)
    desk.on_message(b"d", wire.Queued([A]), AHEAD_S - 1)
    pass_time(desk, AHEAD_S - 1, 2 * AHEAD_S - 2)
    assert desk.is_wanted(A)
    pass_time(desk, 2 * AHEAD_S - 2, 2 * AHEAD_S)
    assert not desk.is_wanted(A) and "did not reserve" in (desk.fate(A) or "")


def test_an_offer_that_was_made_before_is_taken_at_once() -> None:
    desk = p_desk()
    desk.on_message(b"d", ready(A), 0.0)
    assert admit(desk, A, ahead=True) is Admission.SEND
    assert not desk.someone_ahead() and desk.ready(A) == ready(A)
