"""vLLM's scheduler with a watch on it: the same calls, the same answers, and reports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from epd_serve import wire
from epd_serve.engine.argv import WIRING_ENV
from epd_serve.engine.status.scheduler import ReportingScheduler, reporting
from epd_serve.errors import ConfigError
from epd_serve.roles import Role
from epd_serve.sockets import Socket, open_socket, readable
from epd_serve.wire import StageReport
from epd_serve.wiring import StageWiring
from tests.epd_serve.engine.status.fakes import FakeRequest, FakeScheduler, FakeStep
from tests.waiting import PATIENCE_S


class OtherScheduler(FakeScheduler):
    """Where batches overlap."""


class Config:
    """vLLM's scheduler config: a named class wins over its own choice."""

    def __init__(self, overlap: bool) -> None:
        self.async_scheduling = overlap
        self.scheduler_cls: str | None = "epd_serve.engine.status.scheduler.ReportingScheduler"

    def get_scheduler_cls(self) -> Any:
        if self.scheduler_cls is not None:
            return ReportingScheduler
        return OtherScheduler if self.async_scheduling else FakeScheduler


@pytest.fixture
def ear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Socket]:
    wiring = StageWiring("EPD0", Role.EPD, "life", load_publish=f"ipc://{tmp_path}/EPD0.load")
    monkeypatch.setenv(WIRING_ENV, json.dumps(wiring.to_json()))
    with open_socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(wiring.load_publish)
        yield socket


def made(*, overlap: bool = False) -> Any:
    """As EngineCore makes it."""
    config = SimpleNamespace(scheduler_config=Config(overlap))
    return config.scheduler_config.get_scheduler_cls()(vllm_config=config, block_size=32)


def report_with(ear: Socket, **wanted: int) -> StageReport:
    """The next report that says so. Reports go on for ever, whether or not one of them does."""
    end = time.monotonic() + PATIENCE_S
    while readable(ear, max(0.0, end - time.monotonic())):
        report = wire.announcements.decode(ear.recv())
        assert isinstance(report, StageReport)
        if all(getattr(report, name) == value for name, value in wanted.items()):
            return report
    raise AssertionError(f"no report with {wanted}")


@pytest.mark.parametrize("overlap", [False, True])
def test_it_is_the_scheduler_that_vllm_would_use(ear: Socket, overlap: bool) -> None:
    scheduler = made(overlap=overlap)
    assert isinstance(scheduler, OtherScheduler) is overlap and isinstance(scheduler, FakeScheduler)
    assert scheduler.made_with["block_size"] == 32
    assert scheduler.made_with["vllm_config"].scheduler_config.scheduler_cls is not None  # vLLM's config is untouched
    scheduler.shutdown()
    assert scheduler.down


def test_every_call_answers_as_before_and_is_followed_by_a_report(ear: Socket) -> None:
    scheduler = made()
    scheduler.add_request(("r", FakeRequest(100)))
    scheduler.plan = [FakeStep({"r": 100}), FakeStep()]
    report_with(ear, waiting=1)
    step = scheduler.schedule(throttle_prefills=True)
    assert step.num_scheduled_tokens == {"r": 100}
    assert scheduler.update_from_output(step, object()) == {0: "outputs"}
    assert scheduler.finish_requests(["r"], "aborted") == ["r"]
    assert report_with(ear, waiting=0, running=0, pending_prompt_tokens=0).prompt_tokens_per_s > 0
    scheduler.shutdown()


def test_who_takes_features_hears_that_vllm_emptied_its_encoder_cache(ear: Socket) -> None:
    scheduler, heard = made(), []
    cached = scheduler.encoder_cache_manager.cached
    cached["k"] = {"r"}
    scheduler.reset_encoder_cache()  # of one that takes none
    assert not cached
    cached["k"] = {"r"}
    consumer = SimpleNamespace(encoder_cache_reset=lambda: heard.append(dict(cached)))
    scheduler.ec_connector = SimpleNamespace(consumer=consumer)
    scheduler.reset_encoder_cache()
    assert heard == [{}]
    scheduler.shutdown()


def test_no_extension_has_a_field_by_the_name_of_anothers(ear: Socket) -> None:
    """One sets what it owns on the scheduler that all of them are."""
    scheduler = made()
    ours = [one for one in type(scheduler).__mro__ if one.__module__.startswith("epd_serve.")]
    fields = [name for one in ours for name, value in vars(one).items() if not (name[:2] == "__" or callable(value))]
    assert len(ours) >= 3 and "_consumer" in fields and len(set(fields)) == len(fields)
    scheduler.shutdown()


def test_a_class_is_extended_once() -> None:
    assert reporting(FakeScheduler) is reporting(FakeScheduler)
    assert reporting(FakeScheduler).__name__ == "ReportingFakeScheduler"


def test_outside_of_a_stage_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WIRING_ENV, raising=False)
    with pytest.raises(KeyError, match=WIRING_ENV):
        made()


class AscendScheduler(FakeScheduler):
    """vllm-ascend 0.23's `BalanceScheduler`, in outline: its own `schedule` where an instance sends KV."""

    balance = False

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._balance_enabled = self.balance
        self._disable_preemption = True

    def schedule(self, throttle_prefills: bool = False) -> FakeStep:
        if self._balance_enabled or self._disable_preemption:
            raise AssertionError("a copy of schedule that does not ask whether features are there")
        return super().schedule(throttle_prefills)


def test_vllms_own_schedule_runs_where_vllm_ascend_puts_a_copy_before_it(
    ear: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.FakeScheduler", AscendScheduler)
    scheduler = made()
    scheduler.add_request(("r", FakeRequest(100)))
    scheduler.plan = [FakeStep({"r": 100})]
    assert scheduler.schedule().num_scheduled_tokens == {"r": 100}
    scheduler.shutdown()


def test_vllm_ascends_balance_scheduling_ends_the_stage_with_the_reason(
    ear: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.FakeScheduler", AscendScheduler)
    monkeypatch.setattr(AscendScheduler, "balance", True)
    with pytest.raises(ConfigError, match="VLLM_ASCEND_BALANCE_SCHEDULING"):
        made()
