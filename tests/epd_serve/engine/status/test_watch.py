"""The report of a scheduler that is watched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_serve.engine.status.pending import StepWork
from epd_serve.engine.status.watch import COUNT_SHARE, MAX_STEPS, LoadWatch
from epd_serve.phases.stamps import read_stamps
from epd_serve.roles import Role
from epd_serve.trace import STEP, Trace
from epd_serve.wire import StageReport
from epd_serve.wiring import StageWiring
from tests.epd_serve.engine.status.fakes import FakeRequest, FakeScheduler, FakeStep, item


class Watched:
    def __init__(self, role: Role, trace: Trace | None = None) -> None:
        self.scheduler = FakeScheduler()
        self.now = 0.0
        self.reports: list[StageReport] = []
        wiring = StageWiring(f"{role}0", role, "life")
        self.watch = LoadWatch(self.scheduler, wiring, self.reports.append, trace=trace, clock=lambda: self.now)

    def step(self, step: FakeStep) -> FakeStep:
        self.scheduler.plan.append(step)
        self.watch.scheduled(self.scheduler.schedule())
        return step

    @property
    def last(self) -> StageReport:
        return self.reports[-1]

    def look(self) -> StageReport:
        """As the scheduler's next call will, later."""
        self.now += 0.05
        self.watch.changed()
        return self.last


class CountsSlowly(dict[str, FakeRequest]):
    """Requests that take their time to be looked at."""

    def __init__(self, engine: Watched, seconds: float) -> None:
        super().__init__()
        self._engine, self._seconds = engine, seconds

    def values(self) -> Any:
        self._engine.now += self._seconds
        return super().values()


def test_what_a_step_computes_is_pending_until_it_ends() -> None:
    engine = Watched(Role.EPD)
    engine.scheduler.requests["r"] = FakeRequest(100, 0, "WAITING", [item("a", 10, 64)])
    report = engine.look()
    assert (report.waiting, report.running) == (1, 0)
    assert (report.pending_prompt_tokens, report.pending_item_tokens) == (100, 64)
    assert (report.kv_used, report.kv_tokens, report.max_running) == (0.25, 3200, 7)
    step = engine.step(FakeStep({"r": 100}, {"r": [0]}))
    report = engine.look()
    assert (report.waiting, report.running) == (0, 1)
    assert (report.pending_prompt_tokens, report.pending_item_tokens) == (100, 64)
    engine.watch.updated(step)
    report = engine.look()
    assert (report.pending_prompt_tokens, report.pending_item_tokens) == (0, 0)
    assert report.prompt_tokens_per_s == pytest.approx(2000) and report.item_tokens_per_s == pytest.approx(1280)


def test_two_steps_may_be_in_flight() -> None:
    engine = Watched(Role.P)
    engine.scheduler.requests["r"] = FakeRequest(300)
    first, second = engine.step(FakeStep({"r": 100})), engine.step(FakeStep({"r": 150}))
    assert engine.look().pending_prompt_tokens == 300
    engine.watch.updated(first)
    assert engine.look().pending_prompt_tokens == 200
    engine.watch.updated(second)
    assert engine.look().pending_prompt_tokens == 50


def test_steps_that_never_end_are_given_up_with_the_next_that_does() -> None:
    engine = Watched(Role.P)
    engine.scheduler.requests["r"] = FakeRequest(300)
    engine.step(FakeStep({"r": 100}))
    engine.watch.updated(engine.step(FakeStep({"r": 100})))
    assert engine.look().pending_prompt_tokens == 100
    for _ in range(3 * MAX_STEPS):
        engine.step(FakeStep({"r": 1}))
    assert engine.look().pending_prompt_tokens <= 100 + MAX_STEPS


def test_empty_steps_neither_count_nor_measure() -> None:
    engine = Watched(Role.D)
    engine.scheduler.requests["r"] = FakeRequest(10)
    engine.watch.updated(engine.step(FakeStep()))
    assert engine.look().step_s == 0


def test_counting_that_takes_long_is_done_less_often_but_never_misses_the_last_nor_the_first() -> None:
    engine = Watched(Role.P)
    engine.scheduler.requests = requests = CountsSlowly(engine, 0.002)  # type: ignore[assignment]
    requests["r"] = FakeRequest(100)
    engine.watch.changed()
    engine.now += 0.002 / COUNT_SHARE - 0.02
    engine.watch.changed()
    assert [report.waiting for report in engine.reports] == [1]
    requests["s"] = FakeRequest(100)
    engine.now += 0.02
    engine.watch.changed()
    assert [report.waiting for report in engine.reports] == [1, 2]
    requests.clear()
    engine.watch.changed()
    requests["t"] = FakeRequest(100)
    engine.watch.changed()
    assert [report.waiting for report in engine.reports] == [1, 2, 0, 1]


@pytest.mark.parametrize("role", [Role.P, Role.D, Role.PD])
def test_who_takes_features_counts_only_the_items_that_it_is_encoding(role: Role) -> None:
    engine = Watched(role)
    engine.scheduler.requests["r"] = FakeRequest(100, 0, "WAITING", [item("a", 0, 64)])
    assert engine.look().pending_item_tokens == 0
    step = engine.step(FakeStep({"r": 64}, {"r": [0]}))
    assert engine.look().pending_item_tokens == 64
    engine.watch.updated(step)
    assert engine.look().pending_item_tokens == 0


def test_an_encoder_has_no_kv_cache() -> None:
    engine = Watched(Role.E)
    engine.scheduler.kv_cache_manager = SimpleNamespace()
    report = engine.look()
    assert (report.kv_used, report.kv_tokens) == (0, 0) and engine.reports


def test_an_encoder_cache_without_a_list_is_an_empty_one() -> None:
    engine = Watched(Role.EPD)
    engine.scheduler.encoder_cache_manager = SimpleNamespace()
    engine.scheduler.requests["r"] = FakeRequest(100, 0, "WAITING", [item("a", 0, 64)])
    assert engine.look().pending_item_tokens == 64


def test_a_defect_is_said_once_and_ends_the_counting_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = Watched(Role.P)
    engine.scheduler.requests["r"] = FakeRequest(100)
    engine.look()
    engine.watch.scheduled(object())
    engine.watch.scheduled(object())
    engine.watch.changed()
    assert engine.last == StageReport("P0", "life", 0)
    assert len([record for record in caplog.records if "cannot be counted" in record.message]) == 1


def test_each_step_that_did_something_is_stamped_in_a_trace(tmp_path: Path) -> None:
    engine = Watched(Role.EPD, Trace(str(tmp_path / "EPD0.jsonl"), "EPD0"))
    engine.scheduler.requests["r"] = FakeRequest(100, 0, "WAITING", [item("a", 10, 64)])
    engine.scheduler.requests["d"] = FakeRequest(10, 30, "RUNNING")
    first, empty = engine.step(FakeStep({"r": 90, "d": 1}, {"r": [0]})), engine.step(FakeStep())
    second = engine.step(FakeStep({"r": 10, "d": 1}))  # begun before the first one has ended
    engine.now = 0.5
    engine.watch.updated(first)
    engine.watch.updated(empty)
    engine.now = 0.75
    engine.watch.updated(second)
    stamps = read_stamps(tmp_path)
    assert [(one.subject, one.event, one.instance) for one in stamps] == [("", STEP, "EPD0")] * 2
    assert [one.more["t0"] for one in stamps] == [0.0, 0.5]
    work = [{name: value for name, value in one.more.items() if name != "t0"} for one in stamps]
    assert work == [
        vars(StepWork(90, 64, 1, 64**2, sum(range(90)), 30)),
        vars(StepWork(10, 0, 1, 0, sum(range(90, 100)), 31)),
    ]
