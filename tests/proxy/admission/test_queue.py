"""The lines in front of the stages: bounds, order, shares, and that nothing is ever lost or held for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from proxy.admission.queue import LEAST_GRANTS, ORDER, AdmissionQueue, Capacity, Kind, Pace, Ticket
from proxy.config.limits import AdmissionLimits

LIMITS = AdmissionLimits(media_yields_s=5.0, priority_step_s=2.0, priority_limit=3, text_share=0.25, media_share=0.25)
ROOM = Capacity(encodes=2, sequences=8, prefill_tokens=1000)


class Queue:
    """A queue whose clock and capacity each call sets."""

    def __init__(self, limits: AdmissionLimits = LIMITS) -> None:
        self.now, self.room = 0.0, ROOM
        self.all = AdmissionQueue(limits, lambda: self.now, lambda: self.room)

    def admit(self, kind: Kind, now: float, *, priority: int = 0, **more: int) -> Ticket:
        self.now = now
        ticket = Ticket(self.all, kind, self.all.due(kind, priority), **more)
        ticket.enter()
        return ticket

    def enqueue(self, ticket: Ticket, now: float, *, encode: bool = False) -> None:
        self.now = now
        ticket.enqueue(encode=encode)

    def grants(self, now: float, room: Capacity) -> list[Ticket]:
        self.now, self.room = now, room
        return self.all.grants()

    def leave(self, ticket: Ticket, now: float) -> None:
        self.now = now
        ticket.leave()

    def predicted_wait_s(self, kind: Kind, due: float, now: float) -> float | None:
        self.now = now
        return self.all.predicted_wait_s(Ticket(self.all, kind, due))


def stands(queue: Queue, kind: Kind, now: float = 0.0, **more: int) -> Ticket:
    """A request that waits for the stages that prefill and decode."""
    ticket = queue.admit(kind, now, **more)
    queue.enqueue(ticket, now)
    return ticket


def test_an_idle_proxy_lets_everybody_through_at_once() -> None:
    queue = Queue()
    text, media = stands(queue, Kind.TEXT), queue.admit(Kind.MEDIA, 0.0)
    queue.enqueue(media, 0.0, encode=True)
    assert queue.grants(0.0, ROOM) == [media, text]
    assert (text.served, media.served, media.encoding) == (True, False, True)
    queue.enqueue(media, 1.0)
    assert queue.grants(1.0, ROOM) == [media]
    assert queue.all.encoding == 0 and queue.all.served(Kind.MEDIA) == 1


def test_no_more_are_with_the_stages_than_there_is_room_for() -> None:
    queue = Queue()
    tickets = [stands(queue, Kind.TEXT) for _ in range(10)]
    assert queue.grants(0.0, ROOM) == tickets[:8]
    queue.leave(tickets[3], 1.0)
    assert queue.grants(1.0, ROOM) == [tickets[8]]


def test_prompts_count_until_they_are_prefilled_and_sequences_until_the_end() -> None:
    queue = Queue()
    first, second = (stands(queue, Kind.TEXT, tokens=600) for _ in range(2))
    assert queue.grants(0.0, ROOM) == [first]
    first.prefilled()
    assert queue.grants(1.0, ROOM) == [second]
    first.prefilled()  # told twice
    second.prefilled()
    assert queue.grants(2.0, replace(ROOM, sequences=2)) == []
    third = stands(queue, Kind.TEXT, 2.0)
    assert queue.grants(2.0, replace(ROOM, sequences=2)) == []
    queue.leave(first, 3.0)
    assert queue.grants(3.0, replace(ROOM, sequences=2)) == [third]


def test_one_that_is_larger_than_all_there_is_goes_alone() -> None:
    queue = Queue()
    small = stands(queue, Kind.TEXT)
    huge = stands(queue, Kind.TEXT, tokens=10_000, sequences=64)
    later = stands(queue, Kind.TEXT)
    assert queue.grants(0.0, ROOM) == [small]
    queue.leave(small, 1.0)
    assert queue.grants(1.0, ROOM) == [huge], "and nobody smaller overtook it meanwhile"
    queue.leave(huge, 2.0)
    assert queue.grants(2.0, ROOM) == [later]


def test_text_overtakes_media_that_came_shortly_before_it_and_no_other() -> None:
    queue = Queue()
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
    queue = Queue()
    asked = ((Kind.TEXT, 0), (Kind.TEXT, -1), (Kind.MEDIA, 1), (Kind.TEXT, -(10**18)))
    assert [queue.admit(kind, 100.0, priority=priority).due for kind, priority in asked] == [100.0, 98.0, 107.0, 94.0]


def test_neither_modality_takes_the_other_s_share_while_both_are_about() -> None:
    queue = Queue()
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
    queue = Queue(replace(LIMITS, single_queue=True))
    images = [stands(queue, Kind.MEDIA, at) for at in range(8)]
    text = stands(queue, Kind.TEXT, 8.0, priority=-3)
    assert queue.grants(8.0, ROOM) == images, "no share is kept for text"
    queue.leave(images[0], 9.0)
    assert queue.grants(9.0, ROOM) == [text]


def test_a_line_has_an_end_for_each_modality() -> None:
    queue = Queue(replace(LIMITS, text_queue=2, media_queue=1))
    held = [queue.admit(Kind.TEXT, 0.0), stands(queue, Kind.TEXT), queue.admit(Kind.MEDIA, 0.0)]
    assert queue.all.is_full(Kind.TEXT) and queue.all.is_full(Kind.MEDIA)
    queue.leave(held[2], 0.0)
    assert not queue.all.is_full(Kind.MEDIA)
    queue.grants(0.0, ROOM)
    assert not queue.all.is_full(Kind.TEXT)


def test_encoded_media_keeps_its_encoder_s_place_until_it_is_served() -> None:
    queue = Queue()
    images = [queue.admit(Kind.MEDIA, 0.0, tokens=900) for _ in range(3)]
    for ticket in images:
        queue.enqueue(ticket, 0.0, encode=True)
    assert queue.grants(0.0, ROOM) == images[:2]
    for ticket in images[:2]:
        queue.enqueue(ticket, 1.0)
    # The first one's tokens fill the stages: the second waits, and with it its place.
    assert queue.grants(1.0, ROOM) == [images[0], images[2]]
    assert (images[1].line, queue.all.encoding) == ([images[1]], 2)


def test_media_that_goes_ahead_holds_its_encoder_s_place_and_nobody_s_prefill_tokens() -> None:
    queue = Queue()
    ahead = queue.admit(Kind.MEDIA, 0.0, tokens=700)
    queue.enqueue(ahead, 0.0, encode=True)
    assert queue.grants(0.0, ROOM) == [ahead]
    assert ahead.goes_at_once(ahead=True)
    assert (queue.all.encoding, queue.all.served(Kind.MEDIA)) == (1, 1)
    text = stands(queue, Kind.TEXT, tokens=600)
    assert queue.grants(1.0, ROOM) == [text], "nothing of it can be prefilled yet"
    ahead.encoded()
    assert (queue.all.encoding, ahead.prefilling) == (0, True)
    stands(queue, Kind.TEXT, 2.0, tokens=600)
    assert queue.grants(2.0, ROOM) == []


def test_nobody_goes_ahead_while_others_wait_to_be_served_or_there_is_no_room() -> None:
    queue = Queue()
    busy = stands(queue, Kind.TEXT, tokens=600)
    assert queue.grants(0.0, ROOM) == [busy]
    one = queue.admit(Kind.MEDIA, 0.0)
    one.tokens = 600
    assert not one.goes_at_once(ahead=True)
    one.tokens = 10
    stands(queue, Kind.TEXT, tokens=900)
    assert not one.goes_at_once(ahead=True)
    queue.leave(busy, 1.0)
    queue.grants(1.0, ROOM)
    assert one.goes_at_once(ahead=True)
    assert not one.goes_at_once(ahead=True), "it is there already"


def test_who_went_ahead_and_has_to_encode_anew_gives_its_place_back() -> None:
    queue = Queue()
    follower = queue.admit(Kind.MEDIA, 0.0)
    assert follower.goes_at_once(ahead=True)
    follower.give_back()
    assert (follower.ahead, queue.all.waiting(Kind.MEDIA), queue.all.served(Kind.MEDIA)) == (False, 1, 0)
    queue.enqueue(follower, 1.0, encode=True)
    assert queue.grants(1.0, ROOM) == [follower]


def test_the_wait_is_predicted_from_how_fast_the_line_moves() -> None:
    queue = Queue()
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
    queue = Queue()
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
        served = [ticket for ticket in own if ticket.served]
        assert queue.served(kind) == len(served)
        assert queue.waiting(kind) == sum(not ticket.served and not ticket.encoding for ticket in own)
        assert queue.use[kind].sequences == sum(ticket.sequences for ticket in served)
        assert queue.use[kind].tokens == sum(ticket.tokens for ticket in served if ticket.prefilling)
    assert queue.encoding == sum(ticket.encoding for ticket in tickets) <= max(1, capacity.encodes)
    served = [ticket for ticket in tickets if ticket.served]
    assert len(served) <= 1 or sum(ticket.sequences for ticket in served) <= capacity.sequences
    assert not any(ticket.prefilling and (ticket.ahead or not ticket.served) for ticket in tickets)
    assert {ticket for ticket in tickets if ticket.line is not None} == {one for line in queue.lines for one in line}
    assert all(line == sorted(line, key=ORDER) for line in queue.lines)


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
    queue = Queue(replace(LIMITS, single_queue=single, text_queue=6, media_queue=4))
    queue.room = capacity = Capacity(encodes=2, sequences=5, prefill_tokens=100)
    tickets: list[Ticket] = []
    gone: list[Ticket] = []
    now = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        queue.now = now = now + data.draw(st.sampled_from([0.0, 0.1, 3.0]))
        move = data.draw(st.sampled_from(MOVES))
        if move == "admit":
            kind, priority = data.draw(st.sampled_from(Kind)), data.draw(st.integers(-2, 2))
            tokens = data.draw(st.sampled_from([1, 60, 500]))
            tickets.append(queue.admit(kind, now, priority=priority, sequences=2, tokens=tokens))
        elif move == "grants":
            queue.grants(now, capacity)
        elif tickets:
            ticket = data.draw(st.sampled_from(tickets))
            if move == "stand" and ticket.line is None and not ticket.served:
                encode = ticket.kind is Kind.MEDIA and not ticket.encoding and data.draw(st.booleans())
                queue.enqueue(ticket, now, encode=encode)
            elif move == "give back":
                ticket.give_back()
            elif move == "go ahead":
                waited = queue.all.served(ticket.kind)
                went = ticket.goes_at_once(ahead=True)
                assert went is (queue.all.served(ticket.kind) == waited + 1)
                assert not went or (ticket.ahead and not ticket.prefilling)
            elif move == "encoded":
                ticket.encoded()
            elif move == "leave encoders":
                ticket.leave_encoders()
            elif move == "prefilled":
                ticket.prefilled()
            elif move == "leave":
                queue.leave(ticket, now)
                tickets.remove(ticket)
                gone.append(ticket)
            for late in gone:  # what is told of it afterwards changes nothing
                getattr(late, data.draw(st.sampled_from(["encoded", "prefilled", "give_back", "step_back"])))()
        consistent(queue.all, tickets, capacity)
    # Whoever is left gets through, one after the other.
    for _ in range(3 * len(tickets) + 1):
        now += 1.0
        for ticket in list(tickets):
            if ticket.served:
                queue.leave(ticket, now)
                tickets.remove(ticket)
            elif ticket.line is None:
                queue.enqueue(ticket, now)
        queue.grants(now, capacity)
    assert not tickets
    consistent(queue.all, [], capacity)
    assert not any(queue.all.lines) and queue.all.encoding == 0


@examples(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.integers(-3, 3), st.integers(1, 4)), min_size=5, max_size=60),
    st.sampled_from(Kind),
    st.integers(1, 6),
)
def test_nobody_starves(load: list[tuple[Kind, int, int]], kind: Kind, slots: int) -> None:
    """Under a load without end, a request is served before any of its own modality that came after it was due."""
    queue = Queue()
    capacity = Capacity(encodes=4, sequences=slots, prefill_tokens=50)
    served: list[Ticket] = []
    running: list[Ticket] = []
    victim: Ticket | None = None
    came: dict[Ticket, float] = {}
    now = 0.0
    for step in range(400):
        now += 0.2
        if step == 10:
            victim = stands(queue, kind, now, tokens=80, priority=3, sequences=4)
            came[victim] = now
        other, priority, sequences = load[step % len(load)]
        came[stands(queue, other, now, tokens=7 * sequences, priority=priority, sequences=sequences)] = now
        if step % 2 and running:
            queue.leave(running.pop(0), now)
        granted = queue.grants(now, capacity)
        served += granted
        running += granted
        if victim in served:
            break
    assert victim is not None
    after = [ticket for ticket in served if ticket.kind is kind and came[ticket] > victim.due + 6.0]
    assert not after or victim in served[: served.index(after[0])]
    # Whatever came later than any priority can make up for waits behind it, so a bounded number goes first.
    while not victim.served:
        assert running, "it fits when it is alone"
        queue.leave(running.pop(0), now)
        granted = queue.grants(now, capacity)
        running += granted
        assert all(
            ORDER(ticket) < ORDER(victim) or ticket.kind is not kind for ticket in granted if ticket is not victim
        )


steps = st.lists(
    st.tuples(st.sampled_from(list(Kind)), st.booleans(), st.integers(1, 900), st.sampled_from(["go", "end"])),
    max_size=30,
)


@examples(deadline=None, max_examples=100)
@given(steps=steps)
def test_to_go_at_once_is_what_standing_in_an_empty_line_comes_to(
    steps: list[tuple[Kind, bool, int, str]],
) -> None:
    """Two queues get the same requests; in one everybody stands, in the other whoever may goes at once."""
    stood, went = Queue(), Queue()
    here: list[tuple[Ticket, Ticket]] = []
    for now, (kind, encode, tokens, what) in enumerate(steps):
        if what == "end" and here:
            one, other = here.pop(0)
            stood.leave(one, now)
            went.leave(other, now)
        else:
            one, other = (queue.admit(kind, now, tokens=tokens) for queue in (stood, went))
            encode = encode and kind is Kind.MEDIA
            stood.enqueue(one, now, encode=encode)
            if not other.goes_at_once(encode=encode):
                went.enqueue(other, now, encode=encode)
            here.append((one, other))
        stood.grants(now, ROOM)
        went.grants(now, ROOM)
        assert [(one.served, one.encoding) for one, _ in here] == [(one.served, one.encoding) for _, one in here]
        for kind in Kind:
            assert (stood.all.waiting(kind), stood.all.served(kind)) == (went.all.waiting(kind), went.all.served(kind))


def moved(grants: int, seconds: float) -> Pace:
    """A line in which somebody has stood for so long, and so many have gone, evenly."""
    pace = Pace()
    pace.tick(0.0, backlog=True)
    for index in range(grants):
        pace.tick((index + 1) * seconds / grants, backlog=True)
        pace.granted()
    return pace


def test_nobody_is_ahead_and_nobody_can_tell() -> None:
    assert moved(10, 5.0).wait_s(0, 5.0) == 0.0
    assert moved(int(LEAST_GRANTS) - 1, 5.0).wait_s(7, 5.0) is None


def test_a_wait_follows_from_the_pace() -> None:
    assert moved(100, 5.0).wait_s(40, 5.0) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("grants", [4, 9, 25, 100])
def test_what_it_takes_at_least_is_less_and_the_less_so_the_more_has_been_seen(grants: int) -> None:
    pace = moved(grants, 1.0)
    likely, least = pace.wait_s(50, 1.0), pace.wait_s(50, 1.0, at_least=True)
    assert likely is not None and least is not None
    assert likely / least == pytest.approx(1 + 2 / grants**0.5 + 1 / grants, rel=0.1)
