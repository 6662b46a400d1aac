"""The lines in front of the stages: who goes, and past whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.admission.order import PATIENCE
from proxy.admission.queue import LAST_S, LOOKS, MOST_PASSED, Kind, Stage
from tests.proxy.admission.lines import LIMITS, Queue

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


def test_accounts_that_ask_no_more_are_not_remembered() -> None:
    """Who names a tenant of its own with each request makes nothing grow."""
    queue = Queue(places=1000)
    for number in range(5000):
        queue.now = number * 0.01
        ticket = queue.enters(account=f"tenant {number}")
        ticket.leave()
    assert len(queue.all.seen) <= 101


# --- when it is due, for the stages --------------------------------------------------------------------------------


def test_the_stages_are_told_when_it_has_to_begin_and_of_a_late_one_as_of_one_that_has_just_come() -> None:
    queue = Queue()
    ticket = queue.stands(slo_s=5.0, tokens=1000.0)
    assert ticket.due() == pytest.approx(4.0)
    queue.now = 4.5
    assert ticket.due() == pytest.approx(9.5)
    soon = queue.stands(slo_s=5.0, tokens=1000.0, priority=-1)
    assert soon.due() == pytest.approx(6.5)
