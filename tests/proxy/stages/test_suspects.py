"""Bodies that instances die of: who is suspected, who is tried, who is refused, and who gets away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from epd_serve.errors import StageError
from proxy.config.limits import PoisonLimits
from proxy.errors import PoisonousRequest
from proxy.metrics import Metrics
from proxy.stages.poison_records import EXPLAINED
from proxy.stages.suspects import Suspects, Trial
from tests.waiting import PATIENCE_S

P0, P1, P2 = ("P0", "one"), ("P1", "one"), ("P2", "one")


def nothing() -> None:
    """What is given back before a wait where nothing is held."""


class Court:
    """Suspects whose time the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wait_s: float = 60.0, **limits: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr("proxy.stages.suspects._now", lambda: self.now)
        monkeypatch.setattr("proxy.stages.suspects.GATHER_S", 0.0)
        self.metrics = Metrics()
        self.suspects = Suspects(PoisonLimits(**limits), self.metrics, wait_s=wait_s)

    def trial(self, body: bytes = b"body") -> Trial:
        return self.suspects.trial(body)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def dies(self, trial: Trial, incarnation: tuple[str, str]) -> None:
        """An attempt at `incarnation` that ends with it."""
        async with trial.turn(nothing):
            trial.sent()
            trial.died(incarnation, sent_at=self.now)

    async def convicted(self, body: bytes = b"body") -> None:
        for incarnation in (P0, P1):
            await self.dies(self.trial(body), incarnation)
        with pytest.raises(PoisonousRequest):
            self.trial(body).check()


@pytest.fixture
def court(monkeypatch: pytest.MonkeyPatch) -> Court:
    return Court(monkeypatch)


async def test_two_deaths_under_one_body_refuse_it_for_a_while_whoever_sends_it(court: Court) -> None:
    await court.dies(court.trial(), P0)
    court.trial().check()
    await court.dies(court.trial(), P1)
    with pytest.raises(PoisonousRequest, match="refused for 60 s") as refused:
        court.trial().check()
    assert (refused.value.status, refused.value.code) == (422, "poisonous_request")
    court.trial(b"another").check()
    assert court.metric("epd_proxy_suspects", state="refused") == 1
    assert court.metric("epd_proxy_refused_total", reason="poisonous") == 1


async def test_after_its_time_one_death_refuses_it_again_for_twice_as_long(court: Court) -> None:
    await court.convicted()
    court.now += 61
    court.trial().check()
    await court.dies(court.trial(), P2)
    with pytest.raises(PoisonousRequest, match="refused for 120 s"):
        court.trial().check()


async def test_an_answer_acquits(court: Court) -> None:
    for incarnation in (P0, P1, P2):
        await court.dies(court.trial(), incarnation)
        court.trial().survived()
    court.trial().check()
    assert court.metric("epd_proxy_suspects", state="suspected") == 0


async def test_having_been_encoded_acquits_of_the_deaths_of_encoders_only(court: Court) -> None:
    trial = court.trial()
    async with trial.turn(nothing):
        trial.died(("E0", "one"), sent_at=court.now, encoding=True)
    trial.survived(encoding=True)
    assert court.metric("epd_proxy_suspects", state="suspected") == 0
    await court.dies(court.trial(), P0)
    court.trial().survived(encoding=True)
    assert court.metric("epd_proxy_suspects", state="suspected") == 1


async def test_who_had_been_computing_for_long_is_not_suspected(court: Court) -> None:
    trial = court.trial()
    trial.died(P0, sent_at=court.now - 6)
    assert court.metric("epd_proxy_suspects", state="suspected") == 0
    trial.died(P1, sent_at=court.now - 16, ago_s=11)  # it was noticed late, and had just been sent then
    assert court.metric("epd_proxy_suspects", state="suspected") == 1


async def test_several_deaths_at_once_convict_nobody(court: Court) -> None:
    """A node that goes takes several instances with it, and a popular body was on all of them."""
    copies = [court.trial(), court.trial()]
    for copy, incarnation in zip(copies, (P0, P1), strict=True):
        copy.died(incarnation, sent_at=court.now - 1)
    court.trial().check()


async def test_one_request_is_tried_once_more_and_what_is_sent_together_is_one_attempt(court: Court) -> None:
    trial = court.trial()
    for name in ("E0", "E1"):
        trial.died((name, "one"), sent_at=court.now - 1, encoding=True)
    assert not trial.exhausted
    court.now += 10  # so long that nothing is held against the body
    trial.died(P0, sent_at=court.now - 6)
    assert trial.exhausted
    with pytest.raises(StageError, match="it is not tried again"):
        trial.check()


async def test_one_death_counts_once_however_often_it_is_met(court: Court) -> None:
    """Its API server still answers while its engine is gone; several calls of one request may be there, too."""
    trial = court.trial()
    for _ in range(3):
        trial.died(P0, sent_at=court.now)
        court.now += 10
    assert not trial.exhausted
    assert court.metric("epd_proxy_deaths_total", stage="P0") == 1
    trial.died(("P0", "two"), sent_at=court.now)
    with pytest.raises(StageError, match="P0 2 times ended"):
        trial.check()


async def test_an_answer_between_two_deaths_clears_the_request_of_the_first(court: Court) -> None:
    """A stream that goes on has survived where it went on, whatever became of it before."""
    trial = court.trial()
    for life in range(4):
        trial.died(("P0", str(life)), sent_at=court.now)
        trial.check()
        court.now += 20
        trial.survived()
    for life in (4, 5):
        trial.died(("P0", str(life)), sent_at=court.now)
        court.now += 20
    assert trial.exhausted


async def test_having_been_encoded_clears_the_request_of_nothing(court: Court) -> None:
    trial = court.trial()
    trial.died(P0, sent_at=court.now)
    trial.survived(encoding=True)
    court.now += 20
    trial.died(P1, sent_at=court.now)
    assert trial.exhausted


async def test_a_request_is_not_given_up_for_what_killed_its_neighbours(court: Court) -> None:
    """One of sixty, killed three times by chance; the one that had been alone both times is given up."""
    many = [court.trial(b"%d" % number) for number in range(60)]
    for life in ("one", "two", "three"):
        for trial in many:
            trial.died(("P0", life), sent_at=court.now - 10)
            trial.check()
        court.now += 20
    alone = court.trial(b"alone")
    for life in ("four", "five"):
        alone.died(("P0", life), sent_at=court.now - 10)
        court.now += 20
    assert alone.exhausted and not any(trial.exhausted for trial in many)


async def test_one_neighbour_is_enough_whoever_of_the_two_notices_first(court: Court) -> None:
    one, two = court.trial(b"1"), court.trial(b"2")
    for life, order in (("one", (one, two)), ("two", (two, one))):
        for trial in order:
            trial.died(("P0", life), sent_at=court.now - 10)
            trial.check()
        court.now += 20


async def test_whoever_has_its_answer_is_a_neighbour_too_and_no_suspect(court: Court) -> None:
    trial, stream = court.trial(b"new"), court.trial(b"a stream")
    for life in ("one", "two"):
        stream.died(("D0", life), sent_at=court.now - 3, answered=True)
        trial.died(("D0", life), sent_at=court.now - 10)
        trial.check()
        court.now += 20
    assert not stream.exhausted and not stream.suspected


async def test_who_shared_deaths_is_remembered_of_some(court: Court) -> None:
    for number in range(1000):
        court.trial(b"%d" % number).died((f"P{number}", "one"), sent_at=court.now)
    assert len(court.suspects._shared) == EXPLAINED


async def test_suspects_are_tried_one_at_a_time_the_last_one_sent_first_whoever_notices_first(court: Court) -> None:
    order: list[bytes] = []
    together = 0

    async def attempt(trial: Trial, body: bytes) -> None:
        nonlocal together
        async with trial.turn(nothing):
            together += 1
            assert together == 1
            order.append(body)
            await asyncio.sleep(0)
            together -= 1

    tasks = []
    for age, body in ((2, b"old"), (1, b"middle"), (0, b"young")):
        trial = court.trial(body)
        trial.died(P0, sent_at=court.now - age)
        tasks.append(asyncio.create_task(attempt(trial, body)))
    await asyncio.gather(*tasks)
    assert order == [b"young", b"middle", b"old"]


async def test_a_suspect_that_has_to_wait_gives_back_first_what_it_holds(court: Court) -> None:
    held = {"one", "two"}
    one, two = court.trial(b"1"), court.trial(b"2")
    async with one.turn(lambda: held.discard("one")):
        assert held == {"one", "two"}, "no suspect yet"
    for trial in (one, two):
        trial.died(P0, sent_at=court.now)
    async with one.turn(lambda: held.discard("one")):
        waiting = asyncio.create_task(enter(two, lambda: held.discard("two")))
        async with asyncio.timeout(PATIENCE_S):
            while held:
                await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def enter(trial: Trial, before_waiting: Callable[[], None] = nothing) -> None:
    async with trial.turn(before_waiting):
        pass


async def test_whoever_was_on_an_instance_whose_death_is_explained_later_is_no_suspect(court: Court) -> None:
    beside = court.trial(b"beside")
    await court.convicted()
    beside.died(P1, sent_at=court.now)
    assert court.metric("epd_proxy_suspects", state="suspected") == 0


async def test_a_conviction_frees_those_who_were_suspected_of_the_same_deaths(court: Court) -> None:
    trials = {number: court.trial(b"%d" % number) for number in range(50)}
    for trial in trials.values():
        trial.died(P0, sent_at=court.now)
    entered: list[int] = []

    async def attempt(number: int) -> None:
        async with trials[number].turn(nothing):
            entered.append(number)
            await free.wait()

    free = asyncio.Event()
    async with trials[0].turn(nothing):
        others = [asyncio.create_task(attempt(number)) for number in range(1, 50)]
        for _ in range(3):
            await asyncio.sleep(0)
        assert not entered
        trials[0].died(P1, sent_at=court.now)
        async with asyncio.timeout(PATIENCE_S):
            while len(entered) < 49:
                await asyncio.sleep(0)
    free.set()
    await asyncio.gather(*others)
    for number in range(1, 50):
        trials[number].check()
    assert court.metric("epd_proxy_suspects", state="suspected") == 0


async def test_a_trial_is_over_soon_after_as_long_as_the_instance_had_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.stages.suspects.LEAST_S", 0.01)
    court = Court(monkeypatch, blame_s=2 * PATIENCE_S)
    one, two = court.trial(b"1"), court.trial(b"2")
    one.died(P0, sent_at=court.now - 0.01)
    two.died(P0, sent_at=court.now - 1)
    async with one.turn(nothing):
        one.sent()
        async with asyncio.timeout(PATIENCE_S), two.turn(nothing):
            pass


async def test_a_death_that_is_noticed_after_the_trial_is_of_the_trial(court: Court) -> None:
    trial = court.trial()
    trial.died(P0, sent_at=court.now)
    async with trial.turn(nothing):
        trial.sent()
        sent_at = court.now
    court.now += 10  # it hung, and silence takes a while to tell
    trial.died(P1, sent_at=sent_at, ago_s=10)
    with pytest.raises(PoisonousRequest):
        court.trial().check()


async def test_whoever_has_waited_for_others_trials_goes_on_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(monkeypatch, blame_s=0.05)
    trials = [court.trial(b"%d" % number) for number in range(100)]
    for trial in trials:
        trial.died(P0, sent_at=court.now)
    answered, computing = asyncio.Event(), 0

    async def attempt(trial: Trial) -> None:
        nonlocal computing
        async with trial.turn(nothing):
            trial.sent()
            computing += 1
            await answered.wait()

    tasks = [asyncio.create_task(attempt(trial)) for trial in trials]
    async with asyncio.timeout(PATIENCE_S):
        while computing < 100:
            await asyncio.sleep(0.01)
    answered.set()
    await asyncio.gather(*tasks)
    for number in range(100):
        court.trial(b"%d" % number).check()


async def test_one_that_left_while_it_waited_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(monkeypatch, wait_s=2 * PATIENCE_S)
    trials = [court.trial(b"%d" % number) for number in range(3)]
    for trial in trials:
        trial.died(P0, sent_at=court.now)

    async def attempt(trial: Trial) -> None:
        async with trial.turn(nothing):
            pass

    async with trials[0].turn(nothing):
        waiting = [asyncio.create_task(attempt(trial)) for trial in trials[1:]]
        await asyncio.sleep(0)
    waiting[0].cancel()
    async with asyncio.timeout(PATIENCE_S):
        await waiting[1]


async def test_one_on_trial_that_finds_no_instance_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(monkeypatch, wait_s=0.02, blame_s=0.01)
    one, two = court.trial(b"1"), court.trial(b"2")
    for trial in (one, two):
        trial.died(P0, sent_at=court.now)
    async with one.turn(nothing), asyncio.timeout(PATIENCE_S):
        await enter(two)


async def test_what_is_remembered_is_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(monkeypatch, bodies=10, memory_s=600.0)
    for number in range(30):
        court.trial(b"%d" % number).died(P0, sent_at=court.now)
    assert court.metric("epd_proxy_suspects", state="suspected") == 10
    court.now += 601
    court.trial(b"29").check()
    assert court.metric("epd_proxy_suspects", state="suspected") == 0
