"""What is sent to a deployment: its runs, a few requests whose answers are compared, and those that warm it up.

Both have seeds of their own, so that no run meets a picture or a text that a cache has seen.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench.clients.answers import shortened
from bench.clients.bodies import WorkloadSource, chat_body, prepared, spec_bodies
from bench.clients.measure import Plan, measure
from bench.clients.sender import Bounds
from bench.clients.target import Target
from bench.sweep.experiment import PlannedRun
from bench.sweep.running import RunningDeployment
from bench.workloads.arrivals import ClosedLoop
from bench.workloads.images import Images
from bench.workloads.profiles import PROFILES
from bench.workloads.spec import RequestSpec
from bench.workloads.workload import Workload
from deploy import event_loop
from epd_serve.errors import StageError

ANSWERS = 4
ANSWER_TOKENS = 32
ANSWER_S = 300.0
WARM_UP_SEED, ANSWER_SEED = 1_000_003, 1_000_033
"""Added to the experiment's, beyond those of its runs."""
STAND_IN = "sharegpt4o-like"
"""Instead of the user's own requests, which runs have to be the first to send."""


@dataclass(frozen=True)
class SentRequests:
    """The requests of an experiment."""

    workload: Workload
    pictures: Images
    seed: int

    def of_run(self, model: str, run: PlannedRun) -> WorkloadSource:
        """Other ones for every run, the same ones for every deployment's; a file's are always the same."""
        return WorkloadSource(self._specs, self.pictures.data_url, model, self.seed, repeats=bool(self.workload.own))

    def _specs(self, seed: int) -> Iterator[RequestSpec]:
        return self.workload.seeded(seed).endless()

    def _besides(self, seed: int, count: int) -> list[RequestSpec]:
        knobs = replace(self.workload.knobs, seed=self.seed + seed, reuse=0.0)
        one = replace(self.workload, knobs=knobs)
        if self.workload.own:
            one = Workload(STAND_IN, PROFILES[STAND_IN].count, knobs)
        return list(itertools.islice(one.endless(), count))

    def answers(self, running: RunningDeployment) -> list[list[int]]:
        """Token ids of `ANSWERS` greedy answers, asked for one at a time; of several servers each in turn.

        Raises:
            StageError: one is not answered, or not with token ids.
        """
        servers = running.target.servers
        specs = enumerate(self._besides(ANSWER_SEED, ANSWERS))
        bodies = ((at, chat_body(spec, running.model, self.pictures.data_url)) for at, spec in specs)
        return [_tokens(servers[at % len(servers)], body) for at, body in bodies]

    def warm_up(self, running: RunningDeployment, concurrency: int, count: int) -> None:
        """A closed loop that is not counted. Raises StageError where nothing is answered well."""
        specs = self._besides(WARM_UP_SEED, count)
        asks = prepared(spec_bodies(specs, running.model, self.pictures.data_url))
        plan = Plan(ClosedLoop(concurrency), count=count, bounds=Bounds(limit_s=ANSWER_S))
        measured = event_loop.run(measure(running.target, asks, plan, label="warm-up"))
        rows = measured.run.rows
        if not any(row.ok for row in rows):
            raise StageError(f"not one of {len(rows)} warm-up requests was answered: {rows[0].error}", stage="warm-up")


def _tokens(server: Target, body: dict[str, Any]) -> list[int]:
    asked = {**body, "stream": False, "max_tokens": ANSWER_TOKENS, "return_token_ids": True}
    del asked["stream_options"]
    response = event_loop.run(server.ask(json.dumps(asked).encode(), "same-tokens", ANSWER_S))
    found = json.loads(response.body)["choices"][0].get("token_ids") if response.whole(stream=False) else None
    if not found:
        said = response.garbage or shortened(response.tail)
        where = str(server.endpoint)
        raise StageError(f"{where} gives no token ids to a request alone: {response.status} {said}", stage=where)
    return [int(one) for one in found]
