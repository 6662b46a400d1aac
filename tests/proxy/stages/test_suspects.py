"""Bodies that instances die of: who is suspected, who is tried, who is refused, and who gets away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from epd_serve.errors import StageError
from epd_serve.wire import StageReport
from proxy.admission.ticket import Kind
from proxy.config.limits import PoisonLimits
from proxy.errors import PoisonousRequest
from proxy.metrics import Metrics
from proxy.request.parse import Endpoint
from proxy.stages.suspects import Suspects, Trial
from tests.proxy.fakes import (
    QUICK,
    Call,
    Cluster,
    FakeStage,
    answer,
    breaks,
    chunk,
    cluster,
    data_url,
    encodes,
    hangs,
    image_body,
    image_file,
    once,
    refuses,
    settings,
    streams,
    text_body,
)
from tests.waiting import PATIENCE_S

CHAT = Endpoint.CHAT.value
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


async def test_one_that_left_while_it_waited_does_not_hold_up_the_others(court: Court) -> None:
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


# --- through the proxy --------------------------------------------------------------------------------------------

POISON = "the poison"


def dies_of_poison(c: Cluster, *, loses: asyncio.Event | None = None) -> Callable[..., Any]:
    """A stage that dies of one body, with everything that it has; it lives again for the next request."""

    async def behave(stage: FakeStage, call: Call, receive: Any, send: Any) -> None:
        if POISON in str(call.body):
            deaths[stage.id] = deaths.get(stage.id, 0) + 1
            dead, ends[stage.id] = ends.setdefault(stage.id, asyncio.Event()), asyncio.Event()
            dead.set()
            await breaks(stage, call, receive, send)
            return
        dead = ends.setdefault(stage.id, asyncio.Event())
        try:
            async with asyncio.timeout(0.05):
                await dead.wait()
        except TimeoutError:
            await answer(stage, call, receive, send)
        else:
            await breaks(stage, call, receive, send)

    ends: dict[str, asyncio.Event] = {}
    deaths: dict[str, int] = {}
    behave.deaths = deaths  # type: ignore[attr-defined]
    for stage in c.stages.values():
        stage.usual = behave
    return behave


def reborn(c: Cluster) -> None:
    """Give each instance another incarnation, as a launcher does after a death."""
    for name, instance in c.instances.items():
        c.instances[name] = replace(instance, incarnation=f"{name}-life{len(c.stages[name].calls) + 2}")
        c.table.apply(c.instances[name])


async def test_a_poisonous_body_costs_two_instances_and_is_refused_then() -> None:
    async with cluster("PD0", "PD1", "PD2", "PD3") as c:
        behave = dies_of_poison(c)
        first = await c.client.post(CHAT, json=text_body(user=POISON))
        assert first.status_code == 422 and first.json()["error"]["code"] == "poisonous_request"
        reborn(c)
        for _ in range(3):
            again = await c.client.post(CHAT, json=text_body(user=POISON))
            assert again.status_code == 422 and again.json()["error"]["type"] == "invalid_request_error"
        assert sum(behave.deaths.values()) == 2  # type: ignore[attr-defined]
        assert c.metric("epd_proxy_poisonous_total") == 1
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200


async def test_the_two_deaths_may_come_from_two_requests_of_clients() -> None:
    async with cluster("PD0", "PD1", "PD2", config=settings(retries=0)) as c:
        behave = dies_of_poison(c)
        assert [(await c.client.post(CHAT, json=text_body(user=POISON))).status_code for _ in range(3)] == [
            502,
            422,
            422,
        ]
        assert sum(behave.deaths.values()) == 2  # type: ignore[attr-defined]


async def test_innocents_beside_a_poisonous_body_all_succeed() -> None:
    async with cluster("PD0", "PD1", "PD2") as c:
        behave = dies_of_poison(c)
        requests = [asyncio.create_task(c.client.post(CHAT, json=text_body(seed=n))) for n in range(40)]
        for stage in c.stages.values():
            await stage.until(lambda stage: stage.active >= 10)
        poisonous = asyncio.create_task(c.client.post(CHAT, json=text_body(user=POISON)))
        answers = await asyncio.gather(*requests)
        assert {one.status_code for one in answers} == {200}
        assert (await poisonous).status_code == 422
        assert sum(behave.deaths.values()) == 2  # type: ignore[attr-defined]
        assert c.metric("epd_proxy_suspects", state="suspected") == 0
        await c.idle()


async def all_die_with_pd0(c: Cluster, count: int) -> list[asyncio.Task[Any]]:
    """`count` requests under which PD0 dies; all other instances, which come up only then, never answer."""
    dead = asyncio.Event()
    for name, stage in c.stages.items():
        stage.usual = once(dead, breaks) if name == "PD0" else hangs
        if name != "PD0":
            c.table.mark_down(name, "not yet")
    requests = [asyncio.create_task(c.client.post(CHAT, json=text_body(seed=n))) for n in range(count)]
    await c["PD0"].until(lambda stage: stage.active >= count)
    for name in c.stages.keys() - {"PD0"}:
        c.table.apply(replace(c.instances[name], incarnation=f"{name}-life2"))
    c.table.mark_down("PD0", "died")
    dead.set()
    return requests


async def leave(requests: list[asyncio.Task[Any]]) -> None:
    for task in requests:
        task.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


async def test_suspects_that_wait_for_a_trial_hold_no_place_and_keep_no_instance_from_others() -> None:
    config = settings(poison=PoisonLimits(blame_s=PATIENCE_S * 2))
    async with cluster("PD0", "PD1", "PD2", config=config) as c:
        queue = c.pipeline.gate.queue
        requests = await all_die_with_pd0(c, 12)
        async with asyncio.timeout(PATIENCE_S):
            while queue.served(Kind.TEXT) != 1 or queue.waiting(Kind.TEXT) != 11:
                await asyncio.sleep(0.002)
        unrelated = [asyncio.create_task(c.client.post(CHAT, json=text_body(seed=100 + n))) for n in range(20)]
        for name in ("PD1", "PD2"):
            await c[name].until(lambda stage: stage.active >= 10)
        await leave(requests + unrelated)
        await c.idle()


async def test_after_a_death_all_who_were_there_are_soon_served_again_however_long_each_takes() -> None:
    config = settings(poison=PoisonLimits(blame_s=2.0), timeouts=replace(QUICK, instance_wait_s=0.05))
    async with cluster("PD0", "PD1", "PD2", config=config) as c:
        requests = await all_die_with_pd0(c, 30)
        async with asyncio.timeout(PATIENCE_S):
            while c["PD1"].active + c["PD2"].active < 30:
                assert not any(task.done() for task in requests)
                await asyncio.sleep(0.002)
        await leave(requests)
        await c.idle()


async def test_a_refused_connection_and_a_typed_refusal_are_no_deaths() -> None:
    async with cluster("PD0", "PD1") as c:
        for stage in c.stages.values():
            stage.script.append(refuses(503, "not now"))
        assert (await c.client.post(CHAT, json=text_body())).status_code == 200
        assert c.metric("epd_proxy_deaths_total", stage="PD0") == 0
        assert c.metric("epd_proxy_suspects", state="suspected") == 0


async def test_an_engine_that_says_that_it_is_dead_has_died() -> None:
    async with cluster("PD0", "PD1", "PD2") as c:
        for stage in c.stages.values():
            stage.usual = refuses(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        assert (await c.client.post(CHAT, json=text_body())).status_code == 422
        assert sum(len(stage.calls) for stage in c.stages.values()) == 2


async def test_what_dies_after_the_first_byte_is_not_held_against_the_body() -> None:
    async with cluster("PD0") as c:
        c["PD0"].usual = streams(chunk("a"), then="break")
        for _ in range(3):
            await c.aborted_stream(text_body(stream=True))
        assert c.metric("epd_proxy_suspects", state="suspected") == 0


async def test_an_image_that_kills_encoders_does_not_go_on_to_prefill() -> None:
    async with cluster("E0", "E1", "E2", "PD0") as c:
        for name in ("E0", "E1", "E2"):
            c[name].usual = breaks
        assert [(await c.ask()).status_code for _ in range(2)] == [422, 422]
        assert sum(len(c[name].calls) for name in ("E0", "E1", "E2")) == 2 and not c["PD0"].calls
        c["E0"].usual = c["E1"].usual = c["E2"].usual = encodes()
        assert (await c.client.post(CHAT, json=image_body(seed=1))).status_code == 200


async def test_a_stage_that_hangs_of_a_body_dies_of_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.generate.stall_watchdog.CHECK_EVERY_S", 0.01)
    async with cluster("PD0", "PD1", "PD2") as c:
        monkeypatch.setattr(c.table, "silence_s", lambda *_: 11.0)
        for name, instance in c.instances.items():
            c.table.report_stage(StageReport(name, instance.incarnation, 1))

        async def hangs_unheard(stage: FakeStage, call: Call, receive: Any, send: Any) -> None:
            await stage.wait_disconnect(receive)

        for stage in c.stages.values():
            stage.usual = hangs_unheard
        assert (await c.client.post(CHAT, json=text_body())).status_code == 422
        assert sum(len(stage.calls) for stage in c.stages.values()) == 2


async def test_nobody_follows_a_suspect_that_waits_for_its_trial_before_it_encodes() -> None:
    config = settings(poison=PoisonLimits(blame_s=PATIENCE_S * 2))
    async with cluster("E0", "E1", "PD0", config=config) as c:
        red, blue = (data_url(image_file(color=color)) for color in ("red", "blue"))
        together = asyncio.Event()

        async def dies(stage: FakeStage, call: Call, receive: Any, send: Any) -> None:
            if c["E0"].active + c["E1"].active >= 2:
                together.set()
            await together.wait()
            await breaks(stage, call, receive, send)

        c["E0"].usual = c["E1"].usual = dies
        suspects = [asyncio.create_task(c.ask(url)) for url in (red, blue)]
        async with asyncio.timeout(PATIENCE_S):
            while len(c["E0"].calls) + len(c["E1"].calls) < 2:
                await asyncio.sleep(0.002)
        c["E0"].usual = c["E1"].usual = hangs
        async with asyncio.timeout(PATIENCE_S):  # one of them is on trial, and hangs
            while len(c["E0"].calls) + len(c["E1"].calls) < 3 or c["E0"].active + c["E1"].active != 1:
                await asyncio.sleep(0.002)
        c["E0"].usual = c["E1"].usual = encodes()
        async with asyncio.timeout(PATIENCE_S):
            assert [(await c.ask(url, seed=1)).status_code for url in (red, blue)] == [200, 200]
        assert c.pipeline.gate.queue.encoding == 1, "the one on trial"
        await leave(suspects)
        await c.idle()
