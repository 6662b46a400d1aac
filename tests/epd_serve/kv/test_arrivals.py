"""The end of a transfer at D: exactly once, whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.kv.arrivals import Arrivals, End, Worker
from epd_serve.wire import Done, TransferKey

KEY = TransferKey("t", "a")
WORKERS: list[Worker] = [("P0:1", 0), ("P0:1", 1), ("P0:1", 2)]


def arrivals(*, one_sided: bool = False, expected: bool = True) -> Arrivals[str]:
    made = Arrivals[str](one_sided=one_sided)
    made.announce(KEY)
    if expected:
        made.expect(KEY, "request")
    return made


def take(of: Arrivals[str]) -> list[tuple[str, End]]:
    return [*of.take(ok=True), *of.take(ok=False)]


def test_one_sender_with_all_its_packets_ends_a_transfer_whole() -> None:
    a = arrivals()
    assert not a.has_ended()
    assert a.done(WORKERS[0], Done(KEY, True, packets=3), 3) == End(True)
    assert a.has_ended()
    assert a.may_arrive(KEY)  # vLLM has not been told
    assert take(a) == [("request", End(True))]
    assert not a.may_arrive(KEY)
    assert not a.has_ended() and take(a) == []


def test_an_end_waits_for_the_step_that_expects_it() -> None:
    a = arrivals(expected=False)
    a.done(WORKERS[0], Done(KEY, True), 0)
    assert take(a) == []
    a.expect(KEY, "request")
    assert take(a) == [("request", End(True))]


def test_several_senders_end_a_transfer_together() -> None:
    a = arrivals()
    for worker in WORKERS[:2]:
        assert a.done(worker, Done(KEY, True, senders=3), 0) is None
    assert not a.has_ended()
    assert a.done(WORKERS[2], Done(KEY, True, senders=3), 0) == End(True)


def test_the_same_sender_counts_once() -> None:
    a = arrivals()
    for _ in range(5):
        assert a.done(WORKERS[0], Done(KEY, True, packets=2, senders=2), 2) is None
    assert a.done(WORKERS[1], Done(KEY, True, senders=2), 0) == End(True)


def test_a_failed_sender_fails_the_transfer_when_the_others_have_stopped_writing() -> None:
    a = arrivals()
    assert a.done(WORKERS[0], Done(KEY, False, "cancelled", senders=2), 0) is None
    assert not a.has_ended()
    assert a.done(WORKERS[1], Done(KEY, False, "later", senders=2), 0) == End(False, "cancelled")


@pytest.mark.parametrize("arrived", [0, 2, 4])
def test_a_lost_packet_is_found_by_its_number(arrived: int) -> None:
    a = arrivals()
    assert a.done(WORKERS[0], Done(KEY, True, packets=3), arrived) == End(False, f"{arrived} of 3 packets have arrived")


def test_what_was_lost_ends_at_once_where_only_decode_writes() -> None:
    a = arrivals()
    assert a.lost(KEY, "outside of the memory") == End(False, "outside of the memory")
    assert a.done(WORKERS[0], Done(KEY, True), 0) is None
    assert take(a) == [("request", End(False, "outside of the memory"))]


def test_what_was_lost_waits_for_writers_that_need_no_help() -> None:
    a = arrivals(one_sided=True)
    assert a.lost(KEY, "outside") is None
    assert a.done(WORKERS[0], Done(KEY, True, senders=2), 0) is None
    assert not a.has_ended()
    assert a.done(WORKERS[1], Done(KEY, True, senders=2), 0) == End(False, "outside")


@pytest.mark.parametrize("one_sided", [False, True])
def test_done_over_a_connection_that_never_said_hello_is_no_proof(one_sided: bool) -> None:
    assert arrivals(one_sided=one_sided).done(None, Done(KEY, True), 0) == End(False, "the link was interrupted")
    several = arrivals(one_sided=one_sided)
    assert several.done(WORKERS[0], Done(KEY, True, senders=2), 0) is None
    ended = several.done(None, Done(KEY, True, senders=2), 0)  # may be the first one again
    assert ended == (None if one_sided else End(False, "the link was interrupted"))


def test_the_scheduler_ends_what_it_gave_up_whoever_is_silent() -> None:
    a = arrivals(one_sided=True)
    a.done(WORKERS[0], Done(KEY, True, senders=2), 0)
    a.give_up(KEY)
    assert take(a) == [("request", End(False, "given up by the scheduler"))]
    assert a.done(WORKERS[1], Done(KEY, True, senders=2), 0) is None
    assert not a.has_ended()


def test_the_scheduler_gives_up_only_what_is_expected_and_has_not_ended() -> None:
    a = arrivals(expected=False)
    a.give_up(KEY)
    a.expect(KEY, "request")
    assert not a.has_ended()
    a.done(WORKERS[0], Done(KEY, True), 0)
    a.give_up(KEY)
    assert take(a) == [("request", End(True))]


@pytest.mark.parametrize("one_sided", [False, True])
def test_nothing_is_kept_of_what_is_not_announced_or_not_any_more(one_sided: bool) -> None:
    a = arrivals(one_sided=one_sided)
    a.give_up(KEY)
    assert a.take(ok=False)
    for key in (KEY, TransferKey("stranger", "x")):
        assert not a.may_arrive(key)
        assert a.done(WORKERS[0], Done(key, True), 0) is None
        assert a.done(WORKERS[0], Done(key, True, senders=2), 0) is None
        assert a.lost(key, "a hole") is None
        a.give_up(key)
    assert not (a._announced or a._expected or a._arriving or a._ended)


events = st.one_of(
    st.tuples(st.just("done"), st.sampled_from([None, *WORKERS]), st.booleans()),
    st.sampled_from([("lost", None, False), ("give up", None, False), ("take", None, False)]),
)


@given(st.lists(events, max_size=12), st.integers(1, 3), st.booleans())
def test_whatever_happens_a_transfer_is_taken_once_and_whole_only_if_nothing_went_wrong(
    history: list[tuple[str, Worker | None, bool]], senders: int, one_sided: bool
) -> None:
    a = arrivals(one_sided=one_sided)
    before_the_end: list[tuple[str, Worker | None, bool]] = []
    taken: list[End] = []
    for event in history:
        what, worker, ok = event
        if not taken and not a.has_ended():
            before_the_end.append(event)
        if what == "done":
            a.done(worker, Done(KEY, ok, senders=senders), 0)
        elif what == "lost":
            a.lost(KEY, "lost")
        elif what == "give up":
            a.give_up(KEY)
        else:
            taken += [end for _, end in take(a)]
    taken += [end for _, end in take(a)]
    firsts = {worker: ok for what, worker, ok in reversed(before_the_end) if what == "done"}
    said = {worker for worker in firsts if worker is not None}
    wrong = [what for what, _, _ in before_the_end if what in ("lost", "give up")]
    whole = len(said) == senders and all(firsts.values()) and None not in firsts and not wrong
    assert len(taken) <= 1
    assert [end.ok for end in taken] == [whole] or not (taken or whole)
    if taken and one_sided and "give up" not in wrong and senders > 1:
        assert len(said) == senders  # nobody writes any more


def test_what_lacks_its_first_token_has_not_arrived() -> None:
    a = arrivals(expected=False)
    a.expect(KEY, "request", conditional=True)
    a.done(WORKERS[0], Done(KEY, True), 0)
    assert not a.has_ended() and take(a) == []
    a.complete(KEY)
    a.complete(KEY)
    assert a.has_ended() and take(a) == [("request", End(True))]
    a.complete(KEY)
    assert take(a) == []


def test_a_first_token_may_be_there_before_the_kv_and_a_failure_waits_for_none() -> None:
    a = arrivals(expected=False)
    a.expect(KEY, "request", conditional=True)
    a.complete(KEY)
    assert take(a) == []
    a.done(WORKERS[0], Done(KEY, True), 0)
    assert take(a) == [("request", End(True))]
    b = arrivals(expected=False)
    b.expect(KEY, "request", conditional=True)
    b.done(WORKERS[0], Done(KEY, False, "cancelled"), 0)
    assert take(b) == [("request", End(False, "cancelled"))]


def test_kv_that_is_here_is_given_up_with_a_first_token_that_never_comes() -> None:
    a = arrivals(expected=False)
    a.expect(KEY, "request", conditional=True)
    a.done(WORKERS[0], Done(KEY, True), 0)
    a.give_up(KEY)
    ((_, end),) = take(a)
    assert not end.ok and not a.may_arrive(KEY)
