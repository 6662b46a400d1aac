"""`epd-bench load`: send requests to an OpenAI endpoint, and say what its clients would have seen.

Times to first token count from when a request was due, on the first content that is not empty. A run that says nothing
about the server (no good answer, too few, a sender that was late, an endpoint that died) ends with exit code 1 and says
why; Ctrl-C keeps what there is, with 130. Run this away from the server's cores, or remember that it shares them.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bench.clients.bodies import Source, file_requests, file_source, workload_source
from bench.clients.flags import add_flags, header_of, plan_of, rates_of
from bench.clients.measure import Plan
from bench.clients.results import RecordsFile, Results
from bench.clients.slo import attainment, find_goodput
from bench.clients.sweep import RunFound, goodput_text, labels, one_run
from bench.clients.target import Target
from bench.record import environment
from bench.workloads.images import Images
from bench.workloads.requests import Arrivals, Poisson
from bench.workloads.workload import Workload, workload
from epd_serve.errors import ConfigError, StageError

SEARCH_REQUESTS = 100
"""Of a probe for the goodput, at least: of fewer an attainment of 90 % cannot be told from one of 80."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print, keep. Returns 0, 1 where a run is not valid, 128 + signal where one ended it."""
    if (arguments.workload is None) == (arguments.bodies is None):
        raise ConfigError("say what to send: --workload NAME, or --bodies FILE", param="--workload")
    plan, wanted = plan_of(arguments), workload(arguments.workload, arguments) if arguments.workload else None
    rates = rates_of(arguments, wanted.own if wanted else ())
    target = Target(arguments.url, {"x-epd-explain": "1", **dict(map(header_of, arguments.header))})
    served = target.served()  # in any case, so that an endpoint that is down is known at once
    if not (arguments.model or served):
        raise ConfigError(f"{target.endpoint} serves no model: say --model", param="--model")
    model = arguments.model or served[0][0]
    source = _source(arguments, wanted, model)
    _open_many_files()
    env = environment(argv, kind=arguments.kind, asked=arguments)
    env["load"] = {
        "url": str(target.endpoint),
        "model": model,
        "workload": arguments.workload or f"bodies of {arguments.bodies.name}",
        "seed": plan.seed,
        "devices": plan.devices,
        "slos": [str(slo) for slo in plan.slos],
        "duration_s": plan.seconds,
        "count": plan.count,
        "client_on_the_servers_host": target.endpoint.local,
    }
    rows_path = arguments.rows or (arguments.json and arguments.json.with_suffix(".rows.jsonl"))
    phases_path = rows_path.with_suffix(".phases.jsonl") if rows_path and arguments.traces else None
    if phases_path:
        phases_path.unlink(missing_ok=True)
    results = Results(arguments.json, "--json", env)
    with RecordsFile(rows_path) if rows_path else contextlib.nullcontext() as records:
        keep = records.keep if records else None
        run = partial(one_run, target, source, keep=keep, traces=arguments.traces, phases_path=phases_path)
        sweep = _Sweep(run, plan, results)
        try:
            if arguments.find_goodput is None:
                sweep.rates(rates)
            else:
                assert isinstance(rates[0], Poisson), "a search has a rate to begin with"
                sweep.goodput(arguments.find_goodput, rates[0].rate_rps)
        except KeyboardInterrupt:  # between two runs, while requests are made
            sweep.signal = signal.SIGINT
        except StageError as error:
            sweep.wrong = error.message
    return sweep.exit_code()


@dataclass
class _Sweep:
    """Runs one after another, each kept as it ends.

    Attributes:
        signal: that ended it, or 0. wrong: why it is not valid, or makes no more sense; "" while it does.
    """

    run: Callable[[Plan, str, int], RunFound]
    plan: Plan
    results: Results
    signal: int = 0
    wrong: str = ""

    def rates(self, arrivals: Sequence[Arrivals]) -> None:
        """A run of each. Which requests one has depends on its place alone."""
        for number, (label, one) in enumerate(zip(labels(arrivals), arrivals, strict=True)):
            self._one(replace(self.plan, arrivals=one), label, number, ("end",))
        self.wrong = next((f"not valid: {text}" for row in self.results.rows for text in row["objections"]), "")

    def goodput(self, target: float, start_rps: float) -> None:
        """Searches the goodput of the plan's first objective. A rate too bad to be measured, or no steady state, is a
        miss."""
        tried: list[Arrivals] = []
        slo, devices = self.plan.slos[0], self.plan.devices

        def meets(rate: float) -> bool:
            tried.append(Poisson(rate))
            seconds = max(self.plan.seconds or 0.0, SEARCH_REQUESTS / rate)
            plan = replace(self.plan, arrivals=tried[-1], count=None, seconds=seconds)
            measured = self._one(plan, labels(tried)[-1], len(tried) - 1, ("end", "generator")).measured
            share = attainment(measured.window.due(measured.run.rows), slo)
            return share is not None and share >= target and not measured.grows

        met, missed = find_goodput(meets, start_rps)
        print(goodput_text(met, missed, target, slo, devices))
        self.results.figures |= {"goodput_rps": met, **({"goodput_rps_per_device": met / devices} if devices else {})}
        self.results.write()
        if not met:
            self.wrong = "not valid: no rate meets the target"

    def exit_code(self) -> int:
        if self.signal:
            self.wrong = "interrupted; what was measured until then is above and in the files"
        if self.wrong:
            print(f"epd-bench: {self.wrong}", file=sys.stderr)
        return 128 + self.signal if self.signal else int(bool(self.wrong))

    def _one(self, plan: Plan, label: str, number: int, fatal: Collection[str]) -> RunFound:
        """Raises StageError after a run whose objections are of a `fatal` kind: no more runs make sense then."""
        found = self.run(replace(plan, seed=plan.seed + number), label, number)
        self.signal = found.signal
        self.results.keep(found.row, found.figures)
        if ended := [one.text for one in found.measured.objections if one.whose in fatal]:
            raise StageError(ended[0], stage=label)
        return found


def _source(arguments: argparse.Namespace, wanted: Workload | None, model: str) -> Source:
    if wanted is None:
        return file_source(file_requests(arguments.bodies, model))
    repeats = arguments.same or bool(wanted.own)
    data_url = Images(arguments.cache).data_url
    return workload_source(wanted.endless_of, data_url, model, arguments.seed, repeats=repeats)


def _open_many_files() -> None:
    """A connection is an open file: as many as this process may have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
