"""Bodies that instances die of: whose deaths count, who is refused and for how long, and who gets away."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import StageError
from epd_serve.instances import IncarnationId
from proxy.config.limits import PoisonLimits
from proxy.errors import PoisonousRequest
from proxy.metrics import Metrics
from proxy.stages.poison import DEATHS, REMEMBERED, SHARED_DEATHS, TOGETHER_S, Poison, WatchedBody


class Fleet:
    """Instances that die under requests, in a time that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr("proxy.stages.poison._now", lambda: self.now)
        self.metrics = Metrics()
        self.poison = Poison(PoisonLimits(**limits), self.metrics)
        self._lives = 0

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def suspected(self) -> float:
        return self.metric("epd_proxy_suspects", state="suspected")

    def body(self, text: bytes = b"body") -> WatchedBody:
        return self.poison.watched(text)

    def dies(
        self,
        *bodies: WatchedBody,
        answered: WatchedBody | None = None,
        after_s: float = 0.0,
        ago_s: float = 0.0,
        encoding: bool = False,
        name: str = "P0",
    ) -> IncarnationId:
        """An instance that has all these, `after_s` after they were sent; `answered` is one that has its answer."""
        self._lives += 1
        incarnation_id = (name, f"life {self._lives}")
        with ExitStack() as there:
            stays = [there.enter_context(body.at(incarnation_id, encoding=encoding)) for body in bodies]
            if answered is not None:
                there.enter_context(answered.at(incarnation_id))
                answered.answered()
            self.now += after_s
            for stay in stays:
                stay.body.died(stay, incarnation_id, ago_s=ago_s)
        return incarnation_id

    def refused(self, text: bytes = b"body") -> WatchedBody:
        for _ in range(DEATHS):
            self.dies(self.body(text))
            self.now += TOGETHER_S
        with pytest.raises(PoisonousRequest):
            self.body(text).check()
        return self.body(text)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


def test_two_deaths_under_one_body_refuse_it_for_a_while_whoever_sends_it(fleet: Fleet) -> None:
    fleet.dies(fleet.body())
    fleet.body().check()
    fleet.now += 2.0
    fleet.dies(fleet.body())
    with pytest.raises(PoisonousRequest, match="refused for 60 s") as refused:
        fleet.body().check()
    assert (refused.value.status, refused.value.code) == (422, "poisonous_request")
    fleet.body(b"another").check()
    assert fleet.metric("epd_proxy_suspects", state="refused") == 1
    assert fleet.metric("epd_proxy_refused_total", reason="poisonous") == 1


def test_after_its_time_one_death_refuses_it_again_for_twice_as_long_up_to_an_hour(fleet: Fleet) -> None:
    fleet.refused()
    over_s = 61
    for for_s in (120, 240, 480, 960, 1920, 3600, 3600):
        fleet.now += over_s
        over_s = for_s + 1
        fleet.body().check()
        fleet.dies(fleet.body())
        with pytest.raises(PoisonousRequest, match=f"refused for {for_s} s"):
            fleet.body().check()


def test_any_answer_clears_a_body_of_all_that_was_before(fleet: Fleet) -> None:
    for _ in range(5):
        fleet.dies(fleet.body())
        fleet.body().answered()  # of anybody
        fleet.now += 10
        fleet.body().check()
    assert fleet.suspected == 0
    fleet.refused()
    fleet.body().answered()  # of one that was on its way
    fleet.body().check()


def test_having_been_encoded_clears_of_the_deaths_of_encoders_only(fleet: Fleet) -> None:
    fleet.dies(fleet.body(), encoding=True)
    fleet.body().encoded()
    assert fleet.suspected == 0
    fleet.dies(fleet.body())
    fleet.body().encoded()
    assert fleet.suspected == 1


def test_who_had_been_computing_for_long_is_not_suspected(fleet: Fleet) -> None:
    fleet.dies(fleet.body(), after_s=6)
    assert fleet.suspected == 0
    fleet.dies(fleet.body(), after_s=16, ago_s=11)  # it was noticed late, and had just been sent then
    assert fleet.suspected == 1


def test_deaths_within_a_second_count_once(fleet: Fleet) -> None:
    """A node that goes takes several instances with it, and a popular body was on all of them."""
    body = fleet.body()
    for _ in range(5):
        fleet.dies(body)
        fleet.now += TOGETHER_S / 10
        body.check()
    fleet.now += TOGETHER_S
    fleet.dies(fleet.body())
    with pytest.raises(PoisonousRequest):
        fleet.body().check()


def test_what_was_on_its_way_already_is_no_second_proof(fleet: Fleet) -> None:
    """A request with several images is at several encoders."""
    body, ids = fleet.body(), [("E0", "one"), ("E1", "one")]
    with ExitStack() as there:
        stays = [there.enter_context(body.at(one, encoding=True)) for one in ids]
        for stay, one in zip(stays, ids, strict=True):
            fleet.now += 2 * TOGETHER_S
            body.died(stay, one)
    body.check()


def test_a_popular_body_is_never_refused(fleet: Fleet) -> None:
    """It is on every instance that dies, and somebody has an answer to it between two of them."""
    for number in range(50):
        popular = fleet.body(b"popular")
        fleet.dies(popular, fleet.body(b"%d" % number), after_s=0.5)
        fleet.now += 3
        fleet.body(b"popular").answered()
        fleet.body(b"popular").check()


def test_an_innocent_is_not_refused_for_having_shared_both_deaths_and_the_culprit_is_once_it_is_alone(
    fleet: Fleet,
) -> None:
    innocents = [fleet.body(b"%d" % number) for number in range(20)]
    poison = fleet.body(b"poison")
    for there in (20, 9, 2):
        fleet.dies(*innocents[:there], poison, after_s=0.5)
        fleet.now += 1
        for body in (*innocents, poison):
            body.check()
    for body in innocents[2:]:
        body.answered()
    fleet.dies(*innocents[4:], poison, after_s=0.5)  # none of these has shared its deaths
    for body in innocents:
        body.check()
    with pytest.raises(PoisonousRequest):
        poison.check()


def test_one_death_is_held_against_all_who_are_there_by_whoever_notices_first(fleet: Fleet) -> None:
    one, two, both = fleet.body(b"1"), fleet.body(b"2"), ("P0", "one")
    with one.at(both) as first, two.at(both) as second:
        two.died(second, both)
        assert one.suspected and two.suspected
        fleet.now += 2 * TOGETHER_S
        one.died(first, both)
    fleet.body(b"1").check()
    fleet.body(b"2").check()


def test_one_death_counts_once_however_often_it_is_met(fleet: Fleet) -> None:
    body, incarnation_id = fleet.body(), ("P0", "one")
    for _ in range(3):
        with body.at(incarnation_id) as stay:
            body.died(stay, incarnation_id)
        fleet.now += 10
    body.check()
    assert fleet.metric("epd_proxy_deaths_total", stage="P0") == 1


def test_a_request_that_was_alone_is_given_up_for_two_deaths_however_late_they_came(fleet: Fleet) -> None:
    body = fleet.body()
    for _ in range(2):
        body.check()
        fleet.dies(body, after_s=10)
    assert not body.suspected, "nothing is held against the body"
    with pytest.raises(StageError, match="P0 ended while they worked on this, 2 times"):
        body.check()


def test_a_request_is_not_given_up_for_what_killed_its_neighbours_but_not_tried_for_ever(fleet: Fleet) -> None:
    one, two = fleet.body(b"1"), fleet.body(b"2")
    for _ in range(SHARED_DEATHS):
        one.check()
        fleet.dies(one, two, after_s=10)
    with pytest.raises(StageError, match="ended while they worked on this"):
        one.check()


def test_whoever_has_its_answer_is_a_neighbour_too_and_no_suspect(fleet: Fleet) -> None:
    body, stream = fleet.body(b"new"), fleet.body(b"a stream")
    for _ in range(3):
        fleet.dies(body, answered=stream, after_s=10)
        body.check()
        fleet.now += 20
    assert not stream.suspected and not stream.ended


def test_an_answer_between_two_deaths_clears_the_request_of_the_first(fleet: Fleet) -> None:
    """A stream that goes on has survived where it went on, whatever became of it before."""
    body = fleet.body()
    for _ in range(4):
        fleet.dies(body, after_s=10)
        body.check()
        body.answered()
    for _ in range(2):
        body.check()
        fleet.dies(body, after_s=10)
    assert body.over


def test_after_its_second_death_a_request_waits_for_more_than_a_second_and_each_time_longer(fleet: Fleet) -> None:
    body, other = fleet.body(), fleet.body(b"other")
    fleet.dies(body, other)
    assert body.apart_s == 0, "an honest death costs no wait"
    for least in (1, 2, 4, 8):
        fleet.dies(body, other)
        assert least * TOGETHER_S <= body.apart_s <= 2 * least * TOGETHER_S
        fleet.now += body.apart_s
        assert body.apart_s == 0
    body.answered()
    assert body.apart_s == 0


def test_those_who_shared_two_deaths_do_not_come_back_together(fleet: Fleet) -> None:
    bodies = [fleet.body(b"%d" % number) for number in range(20)]
    for _ in range(2):
        fleet.dies(*bodies)
    waits = sorted(body.apart_s for body in bodies)
    assert waits[-1] - waits[0] > TOGETHER_S / 4


def test_what_is_remembered_is_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, bodies=10, memory_s=600.0)
    for number in range(1000):
        fleet.dies(fleet.body(b"%d" % number))
    assert fleet.suspected == 10 and len(fleet.poison._dead) == REMEMBERED and not fleet.poison.there
    fleet.now += 601
    assert fleet.suspected == 0


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.floats(0.0, 3.0)), max_size=12))
def test_nobody_is_refused_who_never_had_two_deaths_a_second_apart_or_had_a_companion_in_all(
    deaths: list[tuple[set[int], float]],
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        fleet = Fleet(monkeypatch)
        shared: dict[int, list[tuple[float, set[int]]]] = {}
        for there, after_s in deaths:
            for one in there:
                shared.setdefault(one, []).append((fleet.now + after_s, there - {one}))
            fleet.dies(*(fleet.body(b"%d" % one) for one in there), after_s=after_s)
        for one, its in shared.items():
            twice = its[-1][0] - its[0][0] >= TOGETHER_S
            companions = set.intersection(*(others for _, others in its))
            body = fleet.body(b"%d" % one)
            if not twice or companions:
                body.check()
