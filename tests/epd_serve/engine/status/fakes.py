"""vLLM's scheduler, requests and steps, the part that is looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


def item(key: str, offset: int, length: int) -> SimpleNamespace:
    return SimpleNamespace(identifier=key, mm_position=SimpleNamespace(offset=offset, length=length))


@dataclass
class FakeRequest:
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    state: str = "WAITING"
    mm_features: list[Any] = field(default_factory=list)

    @property
    def status(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.state)

    def is_finished(self) -> bool:
        return self.state.startswith("FINISHED")


@dataclass(frozen=True)
class FakeStep:
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)


class FakeScheduler:
    """Schedules what `plan` says. `schedule` advances the requests at once, as vLLM does."""

    def __init__(self, **more: Any) -> None:
        self.made_with = more
        self.requests: dict[str, FakeRequest] = {}
        self.plan: list[FakeStep] = []
        self.encoder_cache_manager = SimpleNamespace(cached={})
        self.kv_cache_manager = SimpleNamespace(usage=0.25)
        self.cache_config = SimpleNamespace(num_gpu_blocks=100)
        self.block_size = 32
        self.max_num_running_reqs = 7
        self.down = False

    def schedule(self, throttle_prefills: bool = False) -> FakeStep:
        step = self.plan.pop(0)
        for name, count in step.num_scheduled_tokens.items():
            self.requests[name].num_computed_tokens += count
            self.requests[name].state = "RUNNING"
        for name, indices in step.scheduled_encoder_inputs.items():
            for index in indices:
                self.encoder_cache_manager.cached[self.requests[name].mm_features[index].identifier] = {name}
        return step

    def update_from_output(self, scheduler_output: FakeStep, model_runner_output: object) -> dict[int, str]:
        return {0: "outputs"}

    def add_request(self, request: tuple[str, FakeRequest]) -> None:
        name, added = request
        self.requests[name] = added

    def finish_requests(self, request_ids: list[str], finished_status: object) -> list[str]:
        for name in request_ids:
            del self.requests[name]
        return request_ids

    def reset_encoder_cache(self) -> None:
        self.encoder_cache_manager.cached.clear()

    def shutdown(self) -> None:
        self.down = True
