"""Deployments measured by starting them as a user does, loading them, and taking them down again.

Order: start, ask a few requests alone (their tokens are compared), warm up, a run per rate. Requests alone and those
that warm up have seeds of their own, so that no run meets an image or a text that a cache has seen. A stage that ends
while a rate is measured ends the deployment: that rate is not kept, and the next call measures it and what is missing
after it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from bench.clients.bodies import Source, chat_body, spec_requests, workload_source
from bench.clients.measure import Plan, measure
from bench.clients.results import RecordsFile
from bench.clients.sender import Bounds
from bench.clients.sweep import one_run
from bench.clients.target import Target
from bench.record import environment
from bench.served import served
from bench.sweep.experiment import Deployment, Experiment, PlannedRun, ServedBy
from bench.sweep.running import RunningDeployment, plain_vllm, proxy_status, watched
from bench.sweep.store import PHASES, ROWS, ResultStore
from bench.workloads.images import Images
from bench.workloads.profiles import PROFILES
from bench.workloads.requests import ClosedLoop, RequestSpec
from bench.workloads.workload import Workload
from deploy.cli.command import serve_config
from deploy.host import event_loop
from deploy.plan.blueprint import Blueprint, draw
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

    def source(self, model: str) -> Source:
        """Other ones for every run, the same ones for every deployment's; a file's are always the same."""
        specs, repeats = self.workload.endless_of, bool(self.workload.own)
        return workload_source(specs, self.pictures.data_url, model, self.seed, repeats=repeats)

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
        short = {"max_tokens": ANSWER_TOKENS}
        return [servers[at % len(servers)].token_ids({**body, **short}, ANSWER_S) for at, body in bodies]

    def warm_up(self, running: RunningDeployment, concurrency: int, count: int) -> None:
        """A closed loop that is not counted. Raises StageError where nothing is answered well."""
        specs = self._besides(WARM_UP_SEED, count)
        asks = spec_requests(specs, running.model, self.pictures.data_url)
        plan = Plan(ClosedLoop(concurrency), count=count, bounds=Bounds(limit_s=ANSWER_S))
        measured = event_loop.run(measure(running.target, asks, plan, label="warm-up"))
        rows = measured.run.rows
        if not any(row.ok for row in rows):
            raise StageError(f"not one of {len(rows)} warm-up requests was answered: {rows[0].error}", stage="warm-up")


WARM_UP = 6
"""Requests for each device before the first run: a stage's first few take up to three times as long as the next."""


@dataclass(frozen=True)
class Stages:
    """How deployments of real and of simulated stages are measured.

    Attributes:
        argv: of every `epd-serve serve`: model, engine, device.
        command, arguments: of this measurement, for the record.
    """

    kind: str
    served: Mapping[str, Any]
    requests: SentRequests
    argv: tuple[str, ...]
    command: Sequence[str] = ()
    arguments: argparse.Namespace | None = None

    def check(self, experiment: Experiment) -> None:
        """Each deployment as its launch would check it. Raises ConfigError, LayoutError."""
        for deployment in experiment.deployments:
            self._blueprint(deployment)

    def measure(self, experiment: Experiment, store: ResultStore) -> None:
        deployment = store.deployment
        env = environment(self.command, experiment.kind, self.arguments)
        with self._running(deployment) as running:
            print(f"{deployment.name}: ready in {running.ready_s:.0f} s", flush=True)
            about = {"ready_s": round(running.ready_s, 2), "devices_share_cores": running.shared_cores}
            load = {  # as `epd-bench load` records it
                "url": [str(server.endpoint) for server in running.target.servers],
                "model": running.model,
                "devices": deployment.devices,
                "client_on_the_servers_host": True,
            }
            store.begin({**env, "deployment": {**asdict(deployment), **about}, "load": load})
            if not store.answers:
                store.keep_answers(self.requests.answers(running))
            self.requests.warm_up(running, concurrency=2 * deployment.devices, count=WARM_UP * deployment.devices)
            for run in store.missing(experiment):
                self._run(experiment, store, running, run)

    def _run(self, experiment: Experiment, store: ResultStore, running: RunningDeployment, run: PlannedRun) -> None:
        """One rate, kept where it came to its end with every stage alive."""
        deployment, load = store.deployment, round(os.getloadavg()[0], 2)
        with (
            RecordsFile(store.folder / ROWS, append=True) as rows,
            watched(running.status) as seen,
        ):
            found = one_run(
                running.target,
                self.requests.source(running.model),
                experiment.plan(deployment, run),
                run.label,
                run.number,
                keep=rows.keep,
                traces=running.traces,
                phases_path=store.folder / PHASES if running.traces else None,
            )
        if rows.fault is not None:  # a full disk ends everything, not one deployment
            raise rows.fault
        if found.signal:
            raise KeyboardInterrupt if found.signal == signal.SIGINT else SystemExit(128 + found.signal)
        if seen.died:
            who = "; ".join(f"{name}: {why}" for name, why in seen.died.items())
            raise StageError(f"lost during {run.label}, which is to be measured again: {who}", stage=deployment.name)
        if found.over:
            raise StageError(f"{run.label}: {found.over}", stage=deployment.name)
        about = {"rate": run.rate, "rate_rps": run.rate_rps, "devices": deployment.devices, "load_average_1min": load}
        store.keep({**found.row, **about}, found.figures)

    @contextlib.contextmanager
    def _running(self, deployment: Deployment) -> Iterator[RunningDeployment]:
        blueprint = self._blueprint(deployment)
        with contextlib.ExitStack() as stack:
            if deployment.served_by is ServedBy.VLLM:
                yield stack.enter_context(plain_vllm(deployment, blueprint))
                return
            launch = stack.enter_context(
                served(deployment.layout, (*self.argv, *deployment.flags), name=deployment.name)
            )
            running = RunningDeployment(
                target=Target(launch.url, {"x-epd-explain": "1"}),
                model=launch.model,
                ready_s=launch.ready_s,
                status=partial(proxy_status, launch.url),
                traces=launch.traces,
                shared_cores=blueprint.cores is not None and blueprint.cores.oversubscribed,
            )
            yield running

    def _blueprint(self, deployment: Deployment) -> Blueprint:
        flags = () if deployment.served_by is ServedBy.VLLM else deployment.flags
        return draw(serve_config([*self.argv, "--layout", deployment.layout, *flags]))
