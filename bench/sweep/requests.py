"""What is sent to a deployment: its runs, a few requests whose answers are compared, and those that warm it up.

Both have seeds of their own, so that no run meets a picture or a text that a cache has seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from bench.clients.bodies import WorkloadSource, chat_body, prepared, spec_bodies
from bench.clients.measure import Plan, measure
from bench.clients.sender import Bounds
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
        found = []
        servers = running.target.servers
        with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
            for at, spec in enumerate(self._besides(ANSWER_SEED, ANSWERS)):
                body = chat_body(spec, running.model, self.pictures.data_url)
                found.append(_tokens(client, str(servers[at % len(servers)].endpoint), body))
        return found

    def warm_up(self, running: RunningDeployment, concurrency: int, count: int) -> None:
        """A closed loop that is not counted. Raises StageError where nothing is answered well."""
        specs = self._besides(WARM_UP_SEED, count)
        asks = prepared(spec_bodies(specs, running.model, self.pictures.data_url))
        plan = Plan(ClosedLoop(concurrency), count=count, bounds=Bounds(limit_s=ANSWER_S))
        measured = event_loop.run(measure(running.target, asks, plan, label="warm-up"))
        rows = measured.run.rows
        if not any(row.ok for row in rows):
            raise StageError(f"not one of {len(rows)} warm-up requests was answered: {rows[0].error}", stage="warm-up")


def _tokens(client: httpx.Client, url: str, body: dict[str, Any]) -> list[int]:
    asked = {**body, "stream": False, "max_tokens": ANSWER_TOKENS, "return_token_ids": True}
    del asked["stream_options"]
    try:
        reply = client.post(f"{url}/v1/chat/completions", json=asked)
    except httpx.HTTPError as error:
        raise StageError(f"{url} does not answer a request alone: {error!r}", stage=url) from error
    if reply.status_code != 200:
        raise StageError(f"{url} answers a request alone with {reply.status_code}: {reply.text[:500]}", stage=url)
    found = reply.json()["choices"][0].get("token_ids")
    if not found:
        raise StageError(f"{url} says no token ids of its answer, though it was asked to", stage=url)
    return [int(one) for one in found]
