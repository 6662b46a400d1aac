"""The lines in front of the stages: bounds, order, shares, and that nothing is ever lost or held for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from proxy.admission.queue import AdmissionQueue
from proxy.admission.ticket import Capacity, Kind, Place, QueueFull, Ticket
from proxy.config.limits import AdmissionLimits

LIMITS = AdmissionLimits(media_yields_s=5.0, priority_step_s=2.0, priority_limit=3, text_share=0.25, media_share=0.25)
ROOM = Capacity(encodes=2, sequences=8, prefill_tokens=1000)


def stands(queue: AdmissionQueue, kind: Kind, now: float = 0.0, *, tokens: float = 1.0, **more: int) -> Ticket:
    """A request that waits for the stages that prefill and decode."""
    ticket = queue.admit(kind, now, **more)
    queue.enqueue(ticket, now, tokens=tokens)
    return ticket


def test_an_idle_proxy_lets_everybody_through_at_once() -> None:
    queue = AdmissionQueue(LIMITS)
    text, media = stands(queue, Kind.TEXT), queue.admit(Kind.MEDIA, 0.0)
    queue.enqueue(media, 0.0, encode=True, tokens=1.0)
    assert queue.grants(0.0, ROOM) == [media, text]
    assert (text.place, media.place) == (Place.SERVED, Place.ENCODING)
    queue.enqueue(media, 1.0)
    assert queue.grants(1.0, ROOM) == [media]
    assert queue.encoding == 0 and queue.served(Kind.MEDIA) == 1


def test_no_more_are_with_the_stages_than_there_is_room_for() -> None:
    queue = AdmissionQueue(LIMITS)
    tickets = [stands(queue, Kind.TEXT) for _ in range(10)]
    assert queue.grants(0.0, ROOM) == tickets[:8]
    queue.leave(tickets[3], 1.0)
    assert queue.grants(1.0, ROOM) == [tickets[8]]


def test_prompts_count_until_they_are_prefilled_and_sequences_until_the_end() -> None:
    queue = AdmissionQueue(LIMITS)
    first, second = (stands(queue, Kind.TEXT, tokens=600) for _ in range(2))
    assert queue.grants(0.0, ROOM) == [first]
    queue.prefilled(first)
    assert queue.grants(1.0, ROOM) == [second]
    queue.prefilled(first)  # told twice
    queue.prefilled(second)
    assert queue.grants(2.0, replace(ROOM, sequences=2)) == []
    third = stands(queue, Kind.TEXT, 2.0)
    assert queue.grants(2.0, replace(ROOM, sequences=2)) == []
    queue.leave(first, 3.0)
    assert queue.grants(3.0, replace(ROOM, sequences=2)) == [third]


def test_one_that_is_larger_than_all_there_is_goes_alone() -> None:
    queue = AdmissionQueue(LIMITS)
    small = stands(queue, Kind.TEXT)
    huge = stands(queue, Kind.TEXT, tokens=10_000, sequences=64)
    later = stands(queue, Kind.TEXT)
    assert queue.grants(0.0, ROOM) == [small]
    queue.leave(small, 1.0)
    assert queue.grants(1.0, ROOM) == [huge], "and nobody smaller overtook it meanwhile"
    queue.leave(huge, 2.0)
    assert queue.grants(2.0, ROOM) == [later]


def test_text_overtakes_media_that_came_shortly_before_it_and_no_other() -> None:
    queue = AdmissionQueue(LIMITS)
    busy = stands(queue, Kind.TEXT)
    one = replace(ROOM, sequences=1)
    assert queue.grants(0.0, one) == [busy]
    media = stands(queue, Kind.MEDIA, 0.0)
    soon, late = stands(queue, Kind.TEXT, 4.9), stands(queue, Kind.TEXT, 5.1)
    order = []
    running = busy
    for now in (6.0, 7.0, 8.0):
        queue.leave(running, now)
        [running] = queue.grants(now, one)
        order.append(running)
    assert order == [soon, media, late]


def test_a_client_s_priority_moves_its_turn_by_so_much_and_no_more() -> None:
    queue = AdmissionQueue(LIMITS)
    assert queue.due_at(Kind.TEXT, 100.0, 0) == 100.0
    assert queue.due_at(Kind.TEXT, 100.0, -1) == 98.0
    assert queue.due_at(Kind.MEDIA, 100.0, 1) == 107.0
    assert queue.due_at(Kind.TEXT, 100.0, -(10**18)) == 94.0


def test_neither_modality_takes_the_other_s_share_while_both_are_about() -> None:
    queue = AdmissionQueue(LIMITS)
    text = stands(queue, Kind.TEXT)
    images = [stands(queue, Kind.MEDIA, -10.0) for _ in range(20)]
    assert queue.grants(0.0, ROOM) == [*images[:6], text]
    assert len(queue.grants(0.0, ROOM)) == 0
    texts = [stands(queue, Kind.TEXT) for _ in range(20)]
    assert queue.grants(0.0, ROOM) == texts[:1], "the rest of their share"
    for ticket in (text, *texts):
        queue.leave(ticket, 1.0)
    assert queue.grants(20.0, ROOM) == [], "text may come back at any moment"
    assert len(queue.grants(32.0, ROOM)) == 2, "text has not been about for long"


def test_one_line_in_order_of_arrival_where_that_is_asked_for() -> None:
    queue = AdmissionQueue(replace(LIMITS, single_queue=True))
    images = [stands(queue, Kind.MEDIA, at) for at in range(8)]
    text = stands(queue, Kind.TEXT, 8.0, priority=-3)
    assert queue.grants(8.0, ROOM) == images, "no share is kept for text"
    queue.leave(images[0], 9.0)
    assert queue.grants(9.0, ROOM) == [text]


def test_a_line_has_an_end_for_each_modality() -> None:
    queue = AdmissionQueue(replace(LIMITS, text_queue=2, media_queue=1))
    held = [queue.admit(Kind.TEXT, 0.0), stands(queue, Kind.TEXT), queue.admit(Kind.MEDIA, 0.0)]
    for kind in Kind:
        with pytest.raises(QueueFull):
            queue.admit(kind, 0.0)
    queue.leave(held[2], 0.0)
    queue.admit(Kind.MEDIA, 0.0)
    queue.grants(0.0, ROOM)
    queue.admit(Kind.TEXT, 0.0)


def test_encoded_media_keeps_its_encoder_s_place_until_it_is_served() -> None:
    queue = AdmissionQueue(LIMITS)
    images = [queue.admit(Kind.MEDIA, 0.0) for _ in range(3)]
    for ticket in images:
        queue.enqueue(ticket, 0.0, encode=True, tokens=900)
    assert queue.grants(0.0, ROOM) == images[:2]
    for ticket in images[:2]:
        queue.enqueue(ticket, 1.0)
    # The first one's tokens fill the stages: the second waits, and with it its place.
    assert queue.grants(1.0, ROOM) == [images[0], images[2]]
    assert (images[1].place, queue.encoding) == (Place.TO_SERVE, 2)


def test_media_that_goes_ahead_holds_its_encoder_s_place_and_nobody_s_prefill_tokens() -> None:
    queue = AdmissionQueue(LIMITS)
    ahead = queue.admit(Kind.MEDIA, 0.0)
    queue.enqueue(ahead, 0.0, encode=True, tokens=700)
    assert queue.grants(0.0, ROOM) == [ahead]
    assert queue.goes_ahead(ahead, 0.0, ROOM)
    assert (ahead.place, queue.encoding, queue.served(Kind.MEDIA)) == (Place.SERVED, 1, 1)
    text = stands(queue, Kind.TEXT, tokens=600)
    assert queue.grants(1.0, ROOM) == [text], "nothing of it can be prefilled yet"
    queue.encoded(ahead)
    assert (queue.encoding, ahead.prefilling) == (0, True)
    stands(queue, Kind.TEXT, 2.0, tokens=600)
    assert queue.grants(2.0, ROOM) == []


def test_nobody_goes_ahead_while_others_wait_to_be_served_or_there_is_no_room() -> None:
    queue = AdmissionQueue(LIMITS)
    busy = stands(queue, Kind.TEXT, tokens=600)
    assert queue.grants(0.0, ROOM) == [busy]
    one = queue.admit(Kind.MEDIA, 0.0)
    one.tokens = 600
    assert not queue.goes_ahead(one, 0.0, ROOM)
    one.tokens = 10
    stands(queue, Kind.TEXT, tokens=900)
    assert not queue.goes_ahead(one, 0.0, ROOM)
    queue.leave(busy, 1.0)
    queue.grants(1.0, ROOM)
    assert queue.goes_ahead(one, 1.0, ROOM)
    assert not queue.goes_ahead(one, 1.0, ROOM), "it is there already"


def test_who_went_ahead_and_has_to_encode_anew_gives_its_place_back() -> None:
    queue = AdmissionQueue(LIMITS)
    follower = queue.admit(Kind.MEDIA, 0.0)
    assert queue.goes_ahead(follower, 0.0, ROOM)
    queue.give_back(follower)
    assert (follower.place, follower.ahead, queue.served(Kind.MEDIA), queue.encoding) == (Place.LOADING, False, 0, 0)
    queue.enqueue(follower, 1.0, encode=True)
    assert queue.grants(1.0, ROOM) == [follower]


def test_the_wait_is_predicted_from_how_fast_the_line_moves() -> None:
    queue = AdmissionQueue(LIMITS)
    one = replace(ROOM, sequences=1)
    line = [stands(queue, Kind.TEXT) for _ in range(30)]
    assert queue.predicted_wait_s(Kind.TEXT, 0.0, 0.0) is None, "nobody has gone yet"
    [running] = queue.grants(0.0, one)
    for second in range(1, 11):
        queue.leave(running, second * 2.0)
        [running] = queue.grants(second * 2.0, one)
    assert queue.predicted_wait_s(Kind.TEXT, 20.0, 20.0) == pytest.approx(2.0 * 19, rel=0.1)
    assert queue.predicted_wait_s(Kind.TEXT, -1.0, 20.0) == 0.0, "nobody is ahead of one so urgent"
    for ticket in line:
        queue.leave(ticket, 21.0)
    assert queue.predicted_wait_s(Kind.TEXT, 22.0, 22.0) == 0.0


def test_a_calm_says_nothing_about_the_pace() -> None:
    queue = AdmissionQueue(LIMITS)
    for second in range(100):
        ticket = stands(queue, Kind.TEXT, second * 10.0)
        queue.grants(second * 10.0, ROOM)
        queue.leave(ticket, second * 10.0 + 1)
    for _ in range(20):
        stands(queue, Kind.TEXT, 1000.0)
    queue.grants(1000.0, ROOM)
    assert queue.predicted_wait_s(Kind.TEXT, 1000.0, 1001.0) is None


def consistent(queue: AdmissionQueue, tickets: list[Ticket], capacity: Capacity) -> None:
    """The queue's counts are what its tickets add up to, and within the capacity but for one that is alone."""
    for kind in Kind:
        own = [ticket for ticket in tickets if ticket.kind is kind]
        served = [ticket for ticket in own if ticket.place is Place.SERVED]
        waiting = [ticket for ticket in own if ticket.place not in (Place.SERVED, Place.GONE) and not ticket.encoding]
        assert queue.served(kind) == len(served)
        assert queue.waiting(kind) == len(waiting)
        assert queue._sequences[kind] == sum(ticket.sequences for ticket in served)
        assert queue._tokens[kind] == pytest.approx(sum(ticket.tokens for ticket in served if ticket.prefilling))
    assert queue.encoding == sum(ticket.encoding for ticket in tickets) <= max(1, capacity.encodes)
    served = [ticket for ticket in tickets if ticket.place is Place.SERVED]
    assert len(served) <= 1 or sum(ticket.sequences for ticket in served) <= capacity.sequences
    standing = {ticket for ticket in tickets if ticket.place in (Place.TO_ENCODE, Place.TO_SERVE)}
    lines = [queue._to_encode, *queue._to_serve.values()]
    assert standing == {ticket for line in lines for ticket in line.tickets}


MOVES = (
    "admit",
    "stand",
    "stand",
    "grants",
    "go ahead",
    "leave encoders",
    "encoded",
    "give back",
    "prefilled",
    "leave",
)


@examples(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_every_admitted_request_leaves_exactly_once_and_nothing_stays(data: st.DataObject, single: bool) -> None:
    queue = AdmissionQueue(replace(LIMITS, single_queue=single, text_queue=6, media_queue=4))
    capacity = Capacity(encodes=2, sequences=5, prefill_tokens=100)
    tickets: list[Ticket] = []
    now = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.1, 3.0]))
        move = data.draw(st.sampled_from(MOVES))
        if move == "admit":
            kind = data.draw(st.sampled_from(Kind))
            try:
                tickets.append(queue.admit(kind, now, priority=data.draw(st.integers(-2, 2)), sequences=2))
            except QueueFull:
                assert queue.waiting(kind) >= (6 if kind is Kind.TEXT else 4), "more where a place was given back"
        elif move == "grants":
            queue.grants(now, capacity)
        elif tickets:
            ticket = data.draw(st.sampled_from(tickets))
            if move == "stand" and ticket.place in (Place.LOADING, Place.ENCODING):
                encode = ticket.kind is Kind.MEDIA and not ticket.encoding and data.draw(st.booleans())
                queue.enqueue(ticket, now, encode=encode, tokens=data.draw(st.sampled_from([1.0, 60.0, 500.0])))
            elif move == "give back":
                queue.give_back(ticket)
            elif move == "go ahead":
                waited = queue.served(ticket.kind)
                went = queue.goes_ahead(ticket, now, capacity)
                assert not went or (ticket.ahead and not ticket.prefilling and queue.served(ticket.kind) == waited + 1)
            elif move == "encoded":
                queue.encoded(ticket)
            elif move == "leave encoders":
                queue.leave_encoders(ticket)
            elif move == "prefilled":
                queue.prefilled(ticket)
            elif move == "leave":
                queue.leave(ticket, now)
                queue.leave(ticket, now)
        consistent(queue, tickets, capacity)
    # Whoever is left gets through, one after the other.
    for _ in range(3 * len(tickets) + 1):
        now += 1.0
        for ticket in tickets:
            if ticket.place in (Place.LOADING, Place.ENCODING):
                queue.enqueue(ticket, now)
            elif ticket.place is Place.SERVED:
                queue.leave(ticket, now)
        queue.grants(now, capacity)
    assert all(ticket.place is Place.GONE for ticket in tickets)
    consistent(queue, tickets, capacity)
    assert not queue.somebody_waits() and not any(queue._tokens.values())


@examples(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.integers(-3, 3), st.integers(1, 4)), min_size=5, max_size=60),
    st.sampled_from(Kind),
    st.integers(1, 6),
)
def test_nobody_starves(load: list[tuple[Kind, int, int]], kind: Kind, slots: int) -> None:
    """Under a load without end, a request is served before any of its own modality that came after it was due."""
    queue = AdmissionQueue(LIMITS)
    capacity = Capacity(encodes=4, sequences=slots, prefill_tokens=50)
    served: list[Ticket] = []
    running: list[Ticket] = []
    victim: Ticket | None = None
    now = 0.0
    for step in range(400):
        now += 0.2
        if step == 10:
            victim = stands(queue, kind, now, tokens=80, priority=3, sequences=4)
        other, priority, sequences = load[step % len(load)]
        stands(queue, other, now, tokens=7.0 * sequences, priority=priority, sequences=sequences)
        if step % 2 and running:
            queue.leave(running.pop(0), now)
        granted = queue.grants(now, capacity)
        served += granted
        running += granted
        if victim in served:
            break
    assert victim is not None
    after = [ticket for ticket in served if ticket.kind is kind and ticket.arrived > victim.due + 6.0]
    assert not after or victim in served[: served.index(after[0])]
    # Whatever came later than any priority can make up for waits behind it, so a bounded number goes first.
    while victim.place is not Place.SERVED:
        assert running, "it fits when it is alone"
        queue.leave(running.pop(0), now)
        granted = queue.grants(now, capacity)
        running += granted
        assert all(ticket.order < victim.order or ticket.kind is not kind for ticket in granted if ticket is not victim)


steps = st.lists(
    st.tuples(st.sampled_from(list(Kind)), st.booleans(), st.floats(0.0, 900.0), st.sampled_from(["go", "end"])),
    max_size=30,
)


@examples(deadline=None, max_examples=100)
@given(steps=steps)
def test_to_go_at_once_is_what_standing_in_an_empty_line_comes_to(
    steps: list[tuple[Kind, bool, float, str]],
) -> None:
    """Two queues get the same requests; in one everybody stands, in the other whoever may goes at once."""
    stood, went = AdmissionQueue(LIMITS), AdmissionQueue(LIMITS)
    here: list[tuple[Ticket, Ticket]] = []
    for now, (kind, encode, tokens, what) in enumerate(steps):
        if what == "end" and here:
            one, other = here.pop(0)
            stood.leave(one, now)
            went.leave(other, now)
        else:
            one, other = stood.admit(kind, now), went.admit(kind, now)
            one.tokens = other.tokens = tokens
            encode = encode and kind is Kind.MEDIA
            stood.enqueue(one, now, encode=encode)
            if not went.goes_at_once(other, now, ROOM, encode=encode):
                went.enqueue(other, now, encode=encode)
            here.append((one, other))
        stood.grants(now, ROOM)
        went.grants(now, ROOM)
        assert [(one.place, one.encoding) for one, _ in here] == [(one.place, one.encoding) for _, one in here]
        assert [stood.waiting(kind) for kind in Kind] == [went.waiting(kind) for kind in Kind]
        assert [stood.served(kind) for kind in Kind] == [went.served(kind) for kind in Kind]
