"""The lines in front of the stages: who goes, past whom, what it holds then, and that nothing of it stays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given, note
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.admission.order import PATIENCE
from proxy.admission.pace import LEAST_GRANTS, Pace
from proxy.admission.queue import LAST_S, LOOKS, MOST_PASSED, AdmissionQueue, Kind, Stage, Ticket
from proxy.config.limits import AdmissionLimits
from proxy.registry.instance_state import Lease, Ledger, Work
from proxy.routing.credits import Credit, Need, Speeds, heads_with_room

LIMITS = AdmissionLimits(priority_step_s=2.0, priority_limit=3, encode_s=0.5, encodes_per_instance=2)
RATE = 1000.0


class Queue:
    """A queue in front of one line of places at each stage: `room` says for how large a request there is how many."""

    def __init__(self, limits: AdmissionLimits = LIMITS, *, places: int = 1, encoders: int = 1, heads: int = 1) -> None:
        self.now, self.places, self.encoders = 0.0, places, encoders
        self.refuses: set[float] = set()  # prompts for which there is no room
        self.taken: dict[Stage, set[Ticket]] = {stage: set() for stage in Stage}
        self.speeds = Speeds(RATE, RATE, encoders, heads)
        self.all = AdmissionQueue(limits, lambda: self.now, self._rooms, lambda: self.speeds)

    def _rooms(self, stage: Stage, need: Need, enough: int) -> int:
        if stage is Stage.SERVE and need.tokens in self.refuses:
            return 0
        most = self.encoders if stage is Stage.ENCODE else self.places
        return min(enough, most - len(self.taken[stage]))

    def enters(
        self,
        kind: Kind = Kind.TEXT,
        *,
        slo_s: float = 1000.0,
        tokens: float = 1.0,
        items: tuple[float, ...] = (),
        account: str = "",
        weight: float = 1.0,
        priority: int = 0,
    ) -> Ticket:
        ticket = Ticket(self.all, kind, account, weight, self.now, slo_s, self.all.sooner_s(priority))
        ticket.enter()
        ticket.sized(Need(tokens, items or ((1.0,) if kind is Kind.MEDIA else ())))
        return ticket

    def stands(self, kind: Kind = Kind.TEXT, stage: Stage = Stage.SERVE, **more: object) -> Ticket:
        ticket = self.enters(kind, **more)  # type: ignore[arg-type]
        ticket.enqueue(stage)
        return ticket

    def grants(self, now: float | None = None) -> list[Ticket]:
        """Those whose turn has come; what they take of instances is counted there before the next one goes."""
        self.now = self.now if now is None else now
        gone = []
        for ticket in self.all.grants():
            self.leased(ticket)
            gone.append(ticket)
        return gone

    def leased(self, ticket: Ticket) -> None:
        for stage in tuple(ticket.owes):
            self.taken[stage].add(ticket)
            ticket.leased(stage)

    def ends(self, ticket: Ticket) -> None:
        for taken in self.taken.values():
            taken.discard(ticket)
        ticket.leave()

    def one_by_one(self, first: Ticket | None = None) -> list[Ticket]:
        """All that wait, each after the end of the one before it."""
        order: list[Ticket] = []
        running = first
        while self.all.anybody:
            if running is not None:
                self.ends(running)
            [running] = self.grants()
            order.append(running)
        if running is not None:
            self.ends(running)
        return order


# --- whose turn it is ----------------------------------------------------------------------------------------------


def test_an_idle_proxy_lets_everybody_through_at_once() -> None:
    queue = Queue(places=2)
    text, media = queue.enters(), queue.enters(Kind.MEDIA)
    assert text.goes_at_once() and media.goes_at_once(Stage.ENCODE)
    assert (text.served, media.served, media.encoding) == (True, False, True)
    queue.leased(text)
    queue.leased(media)
    media.leave_encoders()
    assert media.goes_at_once()
    assert queue.all.encoding == 0 and queue.all.served(Kind.MEDIA) == 1


def test_no_more_are_with_the_stages_than_there_is_room_for() -> None:
    queue = Queue(places=3)
    tickets = [queue.stands() for _ in range(10)]
    assert queue.grants() == tickets[:3]
    queue.ends(tickets[1])
    assert queue.grants(1.0) == [tickets[3]]


def test_least_slack_first_of_texts_and_images_alike() -> None:
    queue = Queue()
    busy = queue.stands()
    assert queue.grants() == [busy]
    video = queue.stands(Kind.MEDIA, slo_s=60.0, tokens=20_000.0)
    image = queue.stands(Kind.MEDIA, slo_s=20.0)
    queue.now = 4.0
    text, hurried = queue.stands(slo_s=20.0), queue.stands(slo_s=3.0)
    assert queue.one_by_one(busy) == [hurried, image, text, video]


def test_small_ones_overtake_a_video_that_came_long_before_them_while_it_can_wait() -> None:
    queue = Queue(encoders=1)
    busy = queue.stands(Kind.MEDIA, Stage.ENCODE, slo_s=0.1)
    assert queue.grants() == [busy]
    video = queue.stands(Kind.MEDIA, Stage.ENCODE, items=(30_000.0,), slo_s=90.0)
    queue.now = 10.0
    image = queue.stands(Kind.MEDIA, Stage.ENCODE, slo_s=2.0)
    queue.ends(busy)
    assert queue.grants() == [image]
    queue.ends(image)
    assert queue.grants() == [video]


@pytest.mark.parametrize(("order", "expected"), [("deadline", "cab"), ("fcfs", "abc"), ("sjf", "bca")])
def test_the_setting_says_in_which_order(order: str, expected: str) -> None:
    queue = Queue(replace(LIMITS, order=order))  # type: ignore[arg-type]
    busy = queue.stands(tokens=1.0)
    assert queue.grants() == [busy]
    shapes = {"a": (100.0, 3000.0), "b": (300.0, 10.0), "c": (50.0, 20.0)}
    names = {queue.stands(slo_s=slo_s, tokens=tokens): name for name, (slo_s, tokens) in shapes.items()}
    assert "".join(names[one] for one in queue.one_by_one(busy)) == expected


def test_a_client_s_priority_moves_its_turn_by_so_much_and_no_more() -> None:
    queue = Queue()
    busy = queue.stands()
    assert queue.grants() == [busy]
    asked = [0, -1, 1, -3, -(10**18), 10**18, 3]
    tickets = [queue.stands(priority=priority) for priority in asked]
    assert [queue.all.sooner_s(priority) for priority in asked] == [0.0, 2.0, -2.0, 6.0, 6.0, -6.0, -6.0]
    queue.now = 3.9
    later = queue.stands(priority=-2)  # 4 s sooner
    found = queue.one_by_one(busy)
    assert found == [tickets[at] for at in (3, 4, 1)] + [later] + [tickets[at] for at in (0, 2, 5, 6)]


def test_no_priority_is_heeded_where_that_is_asked_for() -> None:
    queue = Queue(replace(LIMITS, priority_limit=0))
    assert queue.all.sooner_s(-9) == queue.all.sooner_s(9) == 0.0


def test_equals_go_in_order_of_arrival() -> None:
    queue = Queue()
    tickets = [queue.stands() for _ in range(50)]
    assert queue.one_by_one() == tickets


def test_a_lost_cause_goes_after_those_that_can_make_it_until_it_has_waited_so_much_longer() -> None:
    queue = Queue()
    busy = queue.stands()
    assert queue.grants() == [busy]
    before = [queue.stands(slo_s=1e6, tokens=10_000.0) for _ in range(2)]  # 20 s of work
    lost = queue.stands(slo_s=1.0, tokens=1000.0)
    assert lost.before_s == 20.0
    queue.now = 10.0
    queue.ends(busy)
    assert queue.grants() == before[:1]
    queue.now = PATIENCE * 21.0 + 0.1
    assert queue.one_by_one(before[0]) == [lost, before[1]]


def test_what_waits_is_known_in_seconds_of_an_instance() -> None:
    queue = Queue(heads=2, encoders=4)
    busy = queue.stands()
    assert queue.grants() == [busy]
    queue.stands(tokens=3000.0)
    one = queue.stands(tokens=1000.0)
    assert queue.all.work_s[Stage.SERVE] == pytest.approx(4.0) and one.before_s == pytest.approx(1.5), "of two"
    for _ in range(5):
        media = queue.stands(Kind.MEDIA, Stage.ENCODE, items=(1000.0, 1000.0))
    assert media.before_s == pytest.approx(4 * 2.0 / 4)
    assert media.service.encode_s == pytest.approx(1.0), "its two items at two of them"
    queue.places = queue.encoders = 100
    assert len(queue.grants()) == 7
    assert not any(queue.all.work_s.values())


# --- past one without room -----------------------------------------------------------------------------------------


def test_others_that_have_room_overtake_one_that_has_none_so_often_and_no_more() -> None:
    queue = Queue(places=100)
    queue.refuses = {777.0}
    stuck = queue.stands(slo_s=10.0, tokens=777.0)
    small = [queue.stands() for _ in range(MOST_PASSED + 5)]
    assert queue.grants() == small[:MOST_PASSED]
    assert stuck.passed == MOST_PASSED
    assert queue.grants(5.0) == [], "nobody more overtakes it"
    before = queue.stands(slo_s=2.0)
    assert queue.grants() == [before], "who comes before it anyhow does not overtake it"
    queue.refuses = set()
    assert queue.grants() == [stuck, *small[MOST_PASSED:]]


def test_one_without_room_that_is_a_lost_cause_is_overtaken_until_it_is_overdue() -> None:
    queue = Queue(places=1000)
    queue.refuses = {777.0}
    stuck = queue.stands(slo_s=0.1, tokens=777.0)
    queue.now = PATIENCE * 0.777 - 0.01
    small = [queue.stands() for _ in range(2 * MOST_PASSED)]
    assert queue.grants() == small and stuck.passed == 0
    queue.now = PATIENCE * 0.777 + 0.01
    small = [queue.stands() for _ in range(2 * MOST_PASSED)]
    assert queue.grants() == small[:MOST_PASSED] and stuck.passed == MOST_PASSED


def test_only_the_first_few_are_asked_whether_they_have_room() -> None:
    queue = Queue(places=100)
    queue.refuses = {777.0}
    stuck = [queue.stands(slo_s=10.0, tokens=777.0) for _ in range(LOOKS)]
    small = queue.stands()
    assert queue.grants() == []
    queue.ends(stuck[0])
    assert queue.grants() == [small]
    assert [one.passed for one in stuck[1:]] == [1] * (LOOKS - 1)


@pytest.mark.parametrize("stage", list(Stage))
def test_long_ones_leave_the_last_instance_to_short_ones_as_long_as_these_come(stage: Stage) -> None:
    """A video takes nobody's image the last encoder. Of one there is, nobody can leave one."""
    sizes = {"items": (9000.0,)} if stage is Stage.ENCODE else {"tokens": 9000.0}
    queue = Queue(replace(LIMITS, encodes_per_instance=100), places=4, encoders=4, heads=4)
    long = [queue.stands(Kind.MEDIA, stage, **sizes) for _ in range(6)]
    assert queue.grants() == long[:4], "where no short ones come they may have all"
    for ticket in long[:4]:
        queue.ends(ticket)
    assert queue.grants() == long[4:]
    for _ in range(20):
        queue.now += 1.0
        short = queue.enters(Kind.MEDIA, tokens=300.0, items=(300.0,))
        assert short.goes_at_once(stage), "and so does each short one"
        queue.leased(short)
        queue.ends(short)
    more = [queue.stands(Kind.MEDIA, stage, **sizes) for _ in range(3)]
    assert queue.grants() == more[:1], "one of the two that are free is left"
    short = queue.stands(Kind.MEDIA, stage, items=(300.0,), slo_s=1e6)
    assert queue.grants() == [short]
    queue.ends(short)
    queue.now += LAST_S - 0.1
    assert queue.grants() == []
    queue.now += 0.2
    assert queue.grants() == more[1:2], "and no instance idles for longer than that"
    alone = Queue(encoders=1)
    for tokens in (300.0, 300.0, 9000.0):
        ticket = alone.enters(Kind.MEDIA, tokens=tokens, items=(tokens,))
        assert ticket.goes_at_once(stage)
        alone.leased(ticket)
        alone.ends(ticket)


@pytest.mark.parametrize("accounts", ["a", "ab"])
@pytest.mark.parametrize("long", [1, LOOKS + 2])
def test_what_long_ones_leave_to_short_ones_these_get_however_many_wait_before_them(long: int, accounts: str) -> None:
    queue = Queue(replace(LIMITS, encodes_per_instance=1000), encoders=4)
    for _ in range(20):
        queue.now += 1.0
        short = queue.enters(Kind.MEDIA, items=(300.0,))
        assert short.goes_at_once(Stage.ENCODE)
        queue.leased(short)
        queue.ends(short)
    waits = {"items": (9000.0,), "slo_s": 100.0}
    videos = [queue.stands(Kind.MEDIA, Stage.ENCODE, account=accounts[0], **waits) for _ in range(3 + long)]
    assert queue.grants() == videos[:3]
    for number in range(3 * MOST_PASSED):
        queue.now += 0.5
        account = accounts[number % len(accounts)]
        short = queue.stands(Kind.MEDIA, Stage.ENCODE, account=account, items=(300.0,), slo_s=200.0)
        assert queue.grants() == [short]
        queue.ends(short)
    assert videos[3].passed == 0
    queue.ends(videos[0])
    assert queue.grants() == [videos[3]], "who is first of them has the next that is not left"


def test_who_goes_in_its_order_overtakes_nobody() -> None:
    queue = Queue(places=100)
    queue.refuses = {777.0}
    stuck = queue.stands(slo_s=50.0, tokens=777.0)
    assert queue.grants() == []
    before = [queue.stands(slo_s=1.0) for _ in range(3 * MOST_PASSED)]
    assert queue.grants() == before
    assert stuck.passed == 0


def test_being_overtaken_begins_anew_with_the_line() -> None:
    queue = Queue(places=2)
    queue.refuses = {777.0}
    stuck = queue.stands(tokens=777.0)
    others = [queue.stands() for _ in range(2)]
    assert queue.grants() == others and stuck.passed == 2
    stuck.step_back()
    stuck.enqueue()
    assert stuck.passed == 0


def test_a_place_that_is_given_and_counted_nowhere_yet_is_taken() -> None:
    queue = Queue(places=2)
    tickets = [queue.stands() for _ in range(4)]
    assert list(queue.all.grants()) == tickets[:2], "two have had their turn, and no plan yet"
    assert queue.all.owed[Stage.SERVE] == 2 and list(queue.all.grants()) == []
    newcomer = queue.enters()
    tickets[2].leave()
    tickets[3].leave()
    assert not newcomer.goes_at_once()
    queue.leased(tickets[0])
    assert queue.all.owed[Stage.SERVE] == 1 and not newcomer.goes_at_once(), "counted once, at the instance now"
    tickets[1].leave()
    assert queue.all.owed[Stage.SERVE] == 0 and newcomer.goes_at_once()


# --- fair shares ---------------------------------------------------------------------------------------------------


def test_a_backlog_of_one_account_delays_another_by_a_piece_whatever_the_deadlines() -> None:
    queue = Queue()
    loud = [queue.stands(account="loud", slo_s=1.0, tokens=50.0) for _ in range(100)]
    running = queue.grants()
    for _ in range(9):
        queue.ends(running[0])
        running = queue.grants()
    quiet = queue.stands(account="quiet", slo_s=1000.0, tokens=50.0)
    went = []
    while quiet not in went:
        queue.ends(running[0])
        running = queue.grants()
        went += running
    assert len(went) <= 4 and set(went[:-1]) <= set(loud), "until `loud` is 0.1 s ahead"


def test_accounts_share_by_weight_while_both_wait() -> None:
    queue = Queue()
    tickets = [
        queue.stands(account=account, weight=weight, slo_s=slo_s, tokens=100.0)
        for _ in range(200)
        for account, weight, slo_s in (("heavy", 3.0, 900.0), ("light", 1.0, 1.0))
    ]
    order = queue.one_by_one()
    assert len(order) == len(tickets)
    heavy = sum(one.account == "heavy" for one in order[:200])
    assert heavy == pytest.approx(150, abs=4)


def test_who_waits_at_one_stage_is_not_passed_by_what_others_have_of_another() -> None:
    """`quiet` waits for an encoder without room while `loud` is served, and goes first after that."""
    queue = Queue(places=1000)
    queue.encoders = 0
    quiet = queue.stands(Kind.MEDIA, Stage.ENCODE, account="quiet", items=(50.0,))
    other = queue.stands(Kind.MEDIA, Stage.ENCODE, account="loud", items=(50.0,), slo_s=0.1)
    for _ in range(100):
        ticket = queue.enters(account="loud", tokens=50.0)
        assert ticket.goes_at_once()
        queue.leased(ticket)
    queue.encoders = 1
    assert queue.grants() == [quiet]
    queue.ends(quiet)
    assert queue.grants() == [other]


# --- places --------------------------------------------------------------------------------------------------------


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


# --- when it is due, for the stages --------------------------------------------------------------------------------


def test_the_stages_are_told_when_it_has_to_begin_and_of_a_late_one_as_of_one_that_has_just_come() -> None:
    queue = Queue()
    ticket = queue.stands(slo_s=5.0, tokens=1000.0)
    assert ticket.due() == pytest.approx(4.0)
    queue.now = 4.5
    assert ticket.due() == pytest.approx(9.5)
    soon = queue.stands(slo_s=5.0, tokens=1000.0, priority=-1)
    assert soon.due() == pytest.approx(6.5)


# --- predicted waits -----------------------------------------------------------------------------------------------


def test_the_wait_is_predicted_from_how_fast_the_line_moves() -> None:
    queue = Queue()
    line = [queue.stands() for _ in range(30)]
    newcomer = queue.enters()
    assert queue.all.predicted_wait_s(newcomer) is None, "nobody has gone yet"
    [running] = queue.grants()
    for second in range(1, 11):
        queue.ends(running)
        [running] = queue.grants(second * 2.0)
    later = queue.enters()
    assert queue.all.predicted_wait_s(later) == pytest.approx(2.0 * 19, rel=0.1)
    urgent = queue.enters(slo_s=-1000.0)
    assert queue.all.predicted_wait_s(urgent) == 0.0, "nobody is ahead of one so urgent"
    for ticket in [one for one in line if one.line is not None]:
        ticket.leave()
    assert queue.all.predicted_wait_s(later) == 0.0


def test_a_calm_says_nothing_about_the_pace() -> None:
    queue = Queue()
    for second in range(100):
        queue.now = second * 10.0
        ticket = queue.stands()
        assert queue.grants() == [ticket]
        queue.now += 1.0
        queue.ends(ticket)
    queue.now = 1000.0
    line = [queue.stands() for _ in range(20)]
    assert queue.grants() == line[:1]
    queue.now = 1001.0
    assert queue.all.predicted_wait_s(queue.enters()) is None


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


# --- whatever happens ----------------------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Requests that do, in any order, what the steps of the proxy do, in front of places that come and go."""

    @initialize(
        order=st.sampled_from(["deadline", "fcfs", "sjf"]), places=st.integers(1, 3), encoders=st.integers(1, 2)
    )
    def begin(self, order: str, places: int, encoders: int) -> None:
        limits = replace(LIMITS, order=order, encodes_per_instance=1)  # type: ignore[arg-type]
        self.queue = Queue(limits, places=places, encoders=encoders)
        self.queue.refuses = {777.0}
        self.here: list[Ticket] = []
        self.gone: list[Ticket] = []
        self.let_in = dict.fromkeys(Kind, 0)

    def any_of(self, data: st.DataObject, what: str = "") -> Ticket:
        return data.draw(st.sampled_from(self.here), label=what)

    @rule(
        kind=st.sampled_from(Kind),
        account=st.sampled_from("xyz"),
        tokens=st.sampled_from([1.0, 400.0, 777.0, 9000.0]),
        slo_s=st.sampled_from([0.0, 1.0, 50.0]),
        priority=st.integers(-5, 5),
    )
    def enters(self, kind: Kind, account: str, tokens: float, slo_s: float, priority: int) -> None:
        ticket = self.queue.enters(kind, account=account, tokens=tokens, slo_s=slo_s, priority=priority)
        self.here.append(ticket)
        self.let_in[kind] += 1

    @rule(seconds=st.sampled_from([0.0, 0.3, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.queue.now += seconds

    @rule(places=st.integers(0, 3), encoders=st.integers(0, 2))
    def instances_come_and_go(self, places: int, encoders: int) -> None:
        self.queue.places, self.queue.encoders = places, encoders
        self.queue.speeds = Speeds(RATE, RATE, max(1, encoders), max(1, places))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def stands(self, data: st.DataObject) -> None:
        ticket = self.any_of(data)
        if ticket.line is None and not ticket.served:
            encodes = ticket.kind is Kind.MEDIA and not ticket.encoding and data.draw(st.booleans())
            ticket.enqueue(Stage.ENCODE if encodes else Stage.SERVE)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), ahead=st.booleans())
    def tries_at_once(self, data: st.DataObject, ahead: bool) -> None:
        ticket, queue = self.any_of(data), self.queue
        encodes = ticket.kind is Kind.MEDIA and not ahead and not ticket.encoding and data.draw(st.booleans())
        stage = Stage.ENCODE if encodes else Stage.SERVE
        may = not ticket.served and ticket.line is None and not queue.all.lines[stage]
        may = may and queue.all.has_room(ticket, stage)
        assert ticket.goes_at_once(stage, ahead=ahead) is may

    @rule(most=st.integers(0, 5))
    def turns_come(self, most: int) -> None:
        """Plans are made at once, or some time later."""
        for number, ticket in enumerate(self.queue.all.grants()):
            assert ticket.line is None and ticket.owes
            if number < most:
                self.queue.leased(ticket)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), what=st.sampled_from(["encoded", "leave_encoders", "give_back", "prefilled", "step_back"]))
    def does(self, data: st.DataObject, what: str) -> None:
        ticket = self.any_of(data)
        getattr(ticket, what)()
        if not (ticket.encoding or ticket.served):
            for taken in self.queue.taken.values():
                taken.discard(ticket)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def is_leased(self, data: st.DataObject) -> None:
        self.queue.leased(self.any_of(data))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        ticket = self.any_of(data)
        self.here.remove(ticket)
        self.queue.ends(ticket)
        self.gone.append(ticket)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), what=st.sampled_from(["encoded", "leave_encoders", "give_back", "prefilled", "step_back"]))
    def is_told_afterwards(self, data: st.DataObject, what: str) -> None:
        getattr(data.draw(st.sampled_from(self.gone)), what)()

    @invariant()
    def counts_are_what_tickets_add_up_to(self) -> None:
        if not hasattr(self, "queue"):
            return
        queue, here = self.queue.all, self.here
        for kind in Kind:
            own = [one for one in here if one.kind is kind]
            assert queue.served(kind) == sum(one.served for one in own)
            assert queue.use[kind].encoding == sum(one.encoding for one in own)
            assert queue.waiting(kind) == sum(not one.served and not one.encoding for one in own)
            assert queue.arrived[kind] == self.let_in[kind]
        for stage in Stage:
            standing = {one for one in here if one.line is stage}
            lines = queue.lines[stage]
            assert {one for line in lines.values() for _, one in line.in_order(self.queue.now)} == standing
            assert {one.account for one in standing} == set(lines), "no line stays without anybody"
            assert queue.work_s[stage] == pytest.approx(sum(one.work_s(stage) for one in standing), abs=1e-6)
            assert queue.owed[stage] == sum(stage in one.owes for one in here)
        assert not any(one.ahead and not one.served for one in here)
        assert not any(one.line is not None and one.served for one in here)

    @invariant()
    def whoever_waits_and_has_room_is_behind_one_that_was_overtaken_enough(self) -> None:
        """After a look nobody among the first waits that has room."""
        if not hasattr(self, "queue"):
            return
        queue = self.queue.all
        for ticket in queue.grants():
            self.queue.leased(ticket)
        for stage in Stage:
            for ticket in [*queue._in_order(stage, queue.over_share(stage))][:LOOKS]:
                assert not queue.has_room(ticket, stage)
                if ticket.passed >= MOST_PASSED:
                    break

    def teardown(self) -> None:
        """Whoever is left gets through, and nothing stays of anybody."""
        if not hasattr(self, "queue"):
            return
        queue = self.queue
        queue.places, queue.encoders, queue.refuses, queue.speeds = 1, 1, set(), Speeds(RATE, RATE)
        for _ in range(3 * len(self.here) + 1):
            queue.now += 1.0
            for ticket in list(self.here):
                if ticket.line is None and not ticket.served:
                    ticket.enqueue()
                if ticket.served:
                    queue.leased(ticket)
                    queue.ends(ticket)
                    self.here.remove(ticket)
            queue.grants()
        assert not self.here
        self.counts_are_what_tickets_add_up_to()
        assert not any(queue.all.work_s.values()) and not any(queue.all.owed.values())
        assert not any(queue.all.lines.values()) and not queue.all.anybody
        assert queue.all.use == {kind: type(use)() for kind, use in queue.all.use.items()}


TestLife = Life.TestCase
TestLife.settings = examples(max_examples=80, stateful_step_count=40, deadline=None)


STEPS = st.lists(
    st.tuples(st.sampled_from(list(Kind)), st.booleans(), st.sampled_from("xy"), st.sampled_from(["go", "end"])),
    max_size=30,
)


@examples(deadline=None, max_examples=100)
@given(STEPS)
def test_to_go_at_once_is_what_standing_in_an_empty_line_comes_to(steps: list[tuple[Kind, bool, str, str]]) -> None:
    """Two queues get the same requests; in one everybody stands, in the other whoever may goes at once."""
    stood, went = Queue(places=2), Queue(places=2)
    here: list[tuple[Ticket, Ticket]] = []
    for now, (kind, encode, account, what) in enumerate(steps):
        stood.now = went.now = float(now)
        if what == "end" and here:
            one, other = here.pop(0)
            stood.ends(one)
            went.ends(other)
        else:
            one, other = (queue.enters(kind, account=account, tokens=50.0) for queue in (stood, went))
            stage = Stage.ENCODE if encode and kind is Kind.MEDIA else Stage.SERVE
            one.enqueue(stage)
            if other.goes_at_once(stage):
                went.leased(other)
            else:
                other.enqueue(stage)
            here.append((one, other))
        stood.grants()
        went.grants()
        assert [(one.served, one.encoding) for one, _ in here] == [(one.served, one.encoding) for _, one in here]
        for kind in Kind:
            assert (stood.all.waiting(kind), stood.all.served(kind)) == (went.all.waiting(kind), went.all.served(kind))


# --- instances in small --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Prefill:
    """An instance that computes prompts one after the other, and holds each one's KV until its answer has ended."""

    rate: float
    kv_tokens: float
    most: int
    left: dict[Ticket, float]
    decodes_until: dict[Ticket, float]

    def credit(self) -> Credit:
        there = [*self.left, *self.decodes_until]
        return Credit(
            Role.PD,
            sum(self.left.values()),
            self.rate,
            requests=len(there),
            sequences=self.most - len(there),
            kv_tokens=self.kv_tokens - sum(ticket.need.tokens for ticket in there),
        )

    def works(self, seconds: float, now: float) -> list[Ticket]:
        """What ends within so many seconds, after which it is `now`."""
        tokens = seconds * self.rate
        for ticket in list(self.left):
            done = min(tokens, self.left[ticket])
            tokens -= done
            self.left[ticket] -= done
            if self.left[ticket] <= 1e-9:
                del self.left[ticket]
                self.decodes_until[ticket] = now + 0.3
        ended = [ticket for ticket, until in self.decodes_until.items() if until <= now]
        for ticket in ended:
            del self.decodes_until[ticket]
        return ended


SHAPES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.01, 0.1, 1.0]),  # after the one before it
        st.sampled_from([10.0, 500.0, 3000.0, 32_000.0]),
        st.sampled_from(["deadline one", "deadline two"]),
        st.sampled_from([0.2, 2.0, 30.0]),
    ),
    min_size=1,
    max_size=40,
)


@examples(deadline=None, max_examples=100)
@given(SHAPES, st.integers(1, 4), st.sampled_from([4000.0, 40_000.0, math.inf]), st.integers(1, 6))
def test_no_instance_idles_while_work_that_fits_it_waits_and_all_get_through(
    shapes: list[tuple[float, float, str, float]], count: int, kv_tokens: float, most: int
) -> None:
    """Prompts from ten tokens to thirty thousand over instances of 10,000 a second, by the credits of the product. What
    has nothing to compute has no room for whoever waits, and what was given to one is bounded."""
    limits, now = AdmissionLimits(), 0.0
    instances = [Prefill(10_000.0, kv_tokens, most, {}, {}) for _ in range(count)]
    credits_of = {Role.PD: lambda: [one.credit() for one in instances]}

    def rooms(stage: Stage, need: Need, enough: int) -> int:
        all_of = lambda role: credits_of[role]() if role in credits_of else []  # noqa: E731
        return heads_with_room(all_of, need, limits, speeds(), enough)

    def speeds() -> Speeds:
        return Speeds(1.0, 10_000.0, 1, count, paths_there=True)

    queue = AdmissionQueue(limits, lambda: now, rooms, speeds)

    def fits(one: Prefill, ticket: Ticket) -> bool:
        credit = one.credit()
        only = lambda role: [credit] if role is Role.PD else []  # noqa: E731
        return heads_with_room(only, ticket.need, limits, speeds(), 1) > 0

    def planned(ticket: Ticket) -> None:
        """As the router does: where it would be computed soonest, of those with room."""
        with_room = [one for one in instances if fits(one, ticket)]
        assert with_room, "its turn came where it has room"
        chosen = min(with_room, key=lambda one: one.credit().tokens)
        chosen.left[ticket] = ticket.need.tokens
        ticket.leased(Stage.SERVE)

    due, served = [*shapes][::-1], 0
    next_at = due[-1][0]
    for _ in range(200_000):
        while due and next_at <= now:
            _, tokens, account, slo_s = due.pop()
            next_at = now + due[-1][0] if due else math.inf
            ticket = Ticket(queue, Kind.TEXT, account, 1.0, now, slo_s)
            ticket.enter()
            ticket.sized(Need(tokens))
            if ticket.goes_at_once():
                planned(ticket)
            else:
                ticket.enqueue()
        for ticket in queue.grants():
            planned(ticket)
        first = [*queue._in_order(Stage.SERVE, queue.over_share(Stage.SERVE))] if queue.anybody else []
        held_up = next((at for at, ticket in enumerate(first) if ticket.passed >= MOST_PASSED), LOOKS - 1)
        for ticket in first[: held_up + 1]:
            idle = sum(not one.left and fits(one, ticket) for one in instances)
            note(f"{now}: {idle} idle for {ticket.need} of {len(first)}")
            assert idle <= (queue._kept(Stage.SERVE) if ticket.is_long(Stage.SERVE) else 0)
        for one in instances:
            largest = max(one.left.values(), default=0.0)
            assert one.credit().tokens <= limits.prefill_s * one.rate + largest + 1e-6
        if not due and not queue.anybody and not any(one.left or one.decodes_until for one in instances):
            break
        now += 0.02
        for one in instances:
            for ticket in one.works(0.02, now):
                ticket.leave()
                served += 1
    assert served == len(shapes) and not any(queue.owed.values()) and not any(queue.work_s.values())


def test_accounts_that_ask_no_more_are_not_remembered() -> None:
    """Who names a tenant of its own with each request makes nothing grow."""
    queue = Queue(places=1000)
    for number in range(5000):
        queue.now = number * 0.01
        ticket = queue.enters(account=f"tenant {number}")
        ticket.leave()
    assert len(queue.all.seen) <= 101
