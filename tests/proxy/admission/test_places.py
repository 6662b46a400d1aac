"""The places that a request has at the stages, from its turn to the end of its work there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.admission.queue import AdmissionQueue, Kind, Stage, Ticket
from proxy.registry.instance_state import Lease, Ledger, Work
from proxy.routing.credits import Speeds
from tests.proxy.admission.lines import LIMITS, RATE, Queue


def test_encoded_media_keeps_its_encoder_s_place_until_it_is_served() -> None:
    queue = Queue()
    images = [queue.stands(Kind.MEDIA, Stage.ENCODE) for _ in range(3)]
    queue.encoders = 100
    assert queue.grants() == images[:2], "two per encoder"
    for ticket in images[:2]:
        ticket.enqueue()
    assert queue.grants() == [images[0]]
    assert images[2].line is Stage.ENCODE and queue.all.encoding == 1, "its place was free after the look at its line"
    assert queue.grants() == [images[2]]
    assert images[1].line is Stage.SERVE and queue.all.encoding == 2


def test_processes_of_a_host_share_the_encoders_places() -> None:
    for processes, places in ((1, 8), (3, 3), (100, 1)):
        limits = replace(LIMITS, encodes_per_instance=4)
        speeds = Speeds(RATE, RATE, encoders=2)
        queue = AdmissionQueue(limits, lambda: 0.0, lambda *asked: asked[-1], lambda s=speeds: s, processes=processes)
        tickets = [Ticket(queue, Kind.MEDIA) for _ in range(20)]
        for ticket in tickets:
            ticket.enter()
            ticket.enqueue(Stage.ENCODE)
        assert len(list(queue.grants())) == places


def leased_by(ledger: Ledger, instance: Instance, ticket: Ticket, tokens: float = 700.0) -> Lease:
    """What a plan made of one that went ahead: its prompt is counted, and beside that as not to be computed yet."""
    lease = Lease(ledger, instance, {Work.PREFILL: tokens, Work.AHEAD: tokens})
    ticket.leased(Stage.SERVE, lease)
    return lease


P0 = Instance("P0", Role.P, "http://p", "one")


def test_who_goes_ahead_of_its_encoding_is_counted_so_until_that_has_ended() -> None:
    queue, ledger = Queue(places=9), Ledger()
    ticket = queue.enters(Kind.MEDIA, tokens=700.0)
    assert ticket.goes_at_once(Stage.ENCODE) and ticket.goes_at_once(ahead=True)
    assert (queue.all.encoding, queue.all.served(Kind.MEDIA), ticket.ahead) == (1, 1, True)
    lease = leased_by(ledger, P0, ticket)
    ticket.leased(Stage.ENCODE)  # a call that is made again, elsewhere, says so again
    assert ledger.tallies(P0.incarnation_id)[Work.AHEAD].held_weight == 700_000
    ticket.encoded()
    ticket.encoded()
    assert ledger.tallies(P0.incarnation_id)[Work.AHEAD].held == 0
    assert ledger.tallies(P0.incarnation_id)[Work.PREFILL].held == 1, "and now it can be computed"
    assert (queue.all.encoding, queue.all.served(Kind.MEDIA), ticket.ahead) == (0, 1, False)
    lease.release()
    assert not any(tally.held for tally in ledger.tallies(P0.incarnation_id).values())


def test_what_has_had_two_turns_owes_both_until_each_is_counted() -> None:
    """Its items came to be known, by way of another process, just as its turn at the encoders came."""
    queue = Queue(places=9)
    ticket = queue.stands(Kind.MEDIA, Stage.ENCODE)
    assert list(queue.all.grants()) == [ticket]
    assert ticket.goes_at_once(ahead=True)
    assert queue.all.owed == {Stage.ENCODE: 1, Stage.SERVE: 1}
    ticket.leased(Stage.SERVE)
    assert queue.all.owed == {Stage.ENCODE: 1, Stage.SERVE: 0}
    ticket.leave()
    assert queue.all.owed == {Stage.ENCODE: 0, Stage.SERVE: 0}


def test_nobody_goes_ahead_while_others_wait_to_be_served_or_there_is_no_room() -> None:
    queue = Queue()
    busy = queue.stands()
    assert queue.grants() == [busy]
    one = queue.enters(Kind.MEDIA)
    assert not one.goes_at_once(ahead=True)
    waits = queue.stands()
    queue.ends(busy)
    assert not one.goes_at_once(ahead=True), "somebody waits"
    waits.leave()
    assert one.goes_at_once(ahead=True)
    assert not one.goes_at_once(ahead=True), "it is there already"


def test_who_went_ahead_and_has_to_encode_anew_gives_its_place_back() -> None:
    queue = Queue()
    follower = queue.enters(Kind.MEDIA)
    assert follower.goes_at_once(ahead=True)
    follower.give_back()
    assert (follower.ahead, queue.all.waiting(Kind.MEDIA), queue.all.served(Kind.MEDIA)) == (False, 1, 0)
    follower.enqueue(Stage.ENCODE)
    assert queue.grants() == [follower]


def test_whoever_waits_is_told_when_room_is_made() -> None:
    queue, told = Queue(), 0

    def room_made() -> None:
        nonlocal told
        told += 1

    queue.all.room_made = room_made
    ticket = queue.enters(Kind.MEDIA)
    assert ticket.goes_at_once(Stage.ENCODE) and not told
    for step in (partial(ticket.leased, Stage.ENCODE), ticket.leave_encoders, ticket.give_back, ticket.leave):
        before = told
        step()
        assert told > before
    ticket.leased(Stage.ENCODE)
    assert told == before + 1, "nothing is told twice"


def test_a_line_has_an_end_for_each_modality() -> None:
    queue = Queue(replace(LIMITS, text_queue=2, media_queue=1))
    texts, image = [queue.enters(), queue.stands()], queue.enters(Kind.MEDIA)
    assert queue.all.is_full(Kind.TEXT) and queue.all.is_full(Kind.MEDIA)
    image.leave()
    assert not queue.all.is_full(Kind.MEDIA)
    assert queue.grants() == texts[1:] and not queue.all.is_full(Kind.TEXT)
