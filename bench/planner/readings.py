"""How each kind of reading answers a preset: rows, by the planner's simulator.

Pure but for the profiles that are read. What takes no simulation is in `arithmetic.py`.

    goodput     requests a second at which 90 % of the requests attain the SLO, per layout, traffic and SLO
    attainment  share of requests within the SLO, at each rate
    latency     TTFT (mean, P99), TPOT, requests done a second, share of token gaps within the SLO's, at each rate
    breakdown   where a request's mean time goes: its steps by the profile, the rest of its TTFT is waiting
    throughput  requests a second when all come at once
    devices     how many a rate takes: so many times a layout as its goodput goes into it
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from msgspec.structs import replace

from bench.planner.arithmetic import ARITHMETIC
from bench.planner.preset_file import Method, Preset, Row, Traffic, profile_of
from bench.statistic import percentile
from bench.workloads.generate import Knobs
from bench.workloads.profiles import PROFILES
from bench.workloads.requests import Poisson, with_arrivals
from bench.workloads.traffic import traffic_of
from bench.workloads.workload import Workload as Generated
from deploy.planner.candidates import bound_rps
from deploy.planner.fleet import Options
from deploy.planner.goodput import MOST_REQUESTS, SPAN, Goal, goodput
from deploy.planner.profile import DeviceProfile
from deploy.planner.simulate import Simulated, simulate
from deploy.planner.workload import Workload, workload_of
from epd_serve.image_tokens import ImageTokens
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.slo import Slo, parse_slos
from epd_serve.traffic import Request

SAMPLE = 600
"""Requests of a traffic, which begins again after them."""
QUICK, QUICK_SPAN = 0.3, 2.0
"""Of a preset's requests; of a run's length, in TTFTs of its SLO: goodput comes out a little high then."""
HIGHER = ("goodput_rps", "attained", "gaps_within", "done_rps", "per_s", "encode_per_s", "decode_per_s", "intensity")
"""Columns of which more is better."""


@dataclass(frozen=True)
class Asked(Goal):
    """A goal whose runs have so many requests at least: queues take time to become too long."""

    least: int = 300
    span: float = SPAN

    def requests(self, rate_rps: float, seed: int) -> Sequence[Request]:
        span_s = self.span * self.slo.ttft_ms / 1e3
        return self.workload.at(rate_rps, min(max(self.least, round(rate_rps * span_s)), MOST_REQUESTS), seed)


@dataclass(frozen=True)
class Case:
    """A layout of a method under one traffic. named: the layout, as the preset has it. count: requests of a run.
    span: of a run for goodput, see `Asked`."""

    traffic: Traffic
    method: Method
    named: str
    layout: Layout
    profile: DeviceProfile
    workload: Workload
    slos: tuple[Slo, ...]
    rates: tuple[float, ...]
    count: int
    span: float

    @property
    def about(self) -> Row:
        return {"traffic": self.traffic.name, "method": self.method.name, "layout": self.named}

    def options(self, slo: Slo | None) -> Options:
        one = self.method
        return Options(
            policy=one.policy,
            budgets=slo if one.budgets else None,
            max_running=one.max_running,
            step_tokens=one.step_tokens,
            encoder_tokens=one.encoder_tokens,
            image_parts=1,  # no paper says that its system cuts images
        )

    def run(self, rate_rps: float, slo: Slo | None = None) -> Simulated:
        requests = self.workload.at(rate_rps, self.count, 1)
        slos = () if slo is None else (slo,)
        return simulate(self.layout, self.profile, requests, slos=slos, options=self.options(slo))


def workload(traffic: Traffic, tokens: ImageTokens) -> Workload:
    """Requests as the planner takes them. Raises ConfigError: a workload that there is not."""
    chance = random.Random(traffic.name)
    parts = [list(_part(spec, traffic, tokens)) for spec in traffic.mix]
    picked = chance.choices(parts, list(traffic.mix.values()), k=SAMPLE)
    recorded = [replace(own[at], id=f"{at}", at_s=parts[0][at].at_s) for at, own in enumerate(picked)]
    return Workload(traffic.name, tokens, recorded)


def _part(spec: str, traffic: Traffic, tokens: ImageTokens) -> Iterator[Request]:
    if spec not in PROFILES:
        yield from workload_of(spec, tokens).at(1.0, SAMPLE, 0)
        return
    knobs = Knobs(images=traffic.images, output_tokens=traffic.output_tokens)
    due = with_arrivals(Generated(spec, SAMPLE, knobs).requests(), Poisson(1.0), 0)
    yield from (traffic_of(one, tokens.tokens) for one in due)


def cases(preset: Preset, *, quick: bool) -> Iterator[Case]:
    """All pairs of traffic and layouts."""
    count, span = max(40, round(preset.requests * (QUICK if quick else 1))), QUICK_SPAN if quick else SPAN
    for traffic in preset.traffic:
        profile = profile_of(traffic.profile or preset.profile)
        comes = workload(traffic, traffic.tokens or preset.tokens)
        slos = traffic.slos or preset.slos
        judged, rates = parse_slos(slos) if slos else (), traffic.rates or preset.rates
        for method, named in ((one, named) for one in preset.methods for named in one.layouts):
            yield Case(traffic, method, named, parse(named), profile, comes, judged, rates, count, span)


def _goodput(case: Case, share: float) -> Iterator[Row]:
    for slo in case.slos:
        goal = Asked(case.workload, slo, share, case.count, case.span)
        start_rps = bound_rps(case.layout, case.profile, case.workload.work) / 2
        found = goodput(goal, case.layout, case.profile, start_rps, 1, case.options(slo))
        yield {**case.about, "slo": str(slo), "goodput_rps": found}


def _devices(case: Case, share: float) -> Iterator[Row]:
    for row in _goodput(case, share):
        for rate in case.rates if row["goodput_rps"] else ():
            times = math.ceil(rate / row["goodput_rps"])
            yield {**row, "rate_rps": rate, "devices": times * case.layout.device_count}


def _attainment(case: Case, share: float) -> Iterator[Row]:
    for slo, rate in itertools.product(case.slos, case.rates):
        yield {**case.about, "slo": str(slo), "rate_rps": rate, "attained": case.run(rate, slo).attained(0)}


def _latency(case: Case, share: float) -> Iterator[Row]:
    for slo, rate in itertools.product(case.slos or (None,), case.rates):
        run = case.run(rate, slo)
        ttft = [1e3 * one.ttft_s for one in run.served]
        row = {**case.about, "rate_rps": rate, "ttft_ms": fmean(ttft), "ttft_p99_ms": percentile(ttft, 99)}
        row["tpot_ms"] = fmean([1e3 * one.tpot_s for one in run.served if one.tpot_s is not None] or [0.0])
        row["done_rps"] = len(run.served) / run.span_s
        if slo is not None:
            gaps = sum(one.gaps for one in run.served)
            row["gaps_within"] = sum(one.within[0] for one in run.served) / gaps if gaps else 1.0
        yield row


def _breakdown(case: Case, share: float) -> Iterator[Row]:
    for rate in case.rates:
        run, requests = case.run(rate), case.workload.at(rate, case.count, 1)
        steps = [_steps(case, one) for one in requests]
        parts = {name: 1e3 * fmean(one[name] for one in steps) for name in steps[0]}
        ttft_ms = 1e3 * fmean(one.ttft_s for one in run.served)
        kv_ms = 1e3 * fmean(_kv_s(case, one) for one in requests)
        decode_ms = 1e3 * fmean(one.e2e_s - one.ttft_s for one in run.served) - kv_ms
        waiting_ms = max(0.0, ttft_ms - sum(parts.values()))
        whole = {**parts, "waiting": waiting_ms, "kv": kv_ms, "decode": decode_ms}
        shares = {f"{name}_share": ms / sum(whole.values()) for name, ms in whole.items()}
        yield {**case.about, "rate_rps": rate, **{f"{name}_ms": ms for name, ms in whole.items()}, **shares}


def _steps(case: Case, request: Request) -> Mapping[str, float]:
    """Seconds to a request's first token, alone."""
    stage = case.profile.stages[min(member.tp for member in case.layout.members())]
    context = stage.prefill_context_s * request.prompt_tokens**2 / 2
    apart = any(member.role.value == "E" for member in case.layout.members())
    return {
        "front": case.profile.front.seconds(request.item_tokens or 1e-9),
        "encode": stage.encode.seconds(request.item_tokens),
        "handover": case.profile.handover.seconds(request.item_tokens) if apart else 0.0,
        "prefill": stage.prefill.seconds(request.prompt_tokens) + context,
    }


def _kv_s(case: Case, request: Request) -> float:
    """From P to D, after the first token."""
    apart = any(member.role.value == "D" for member in case.layout.members())
    return case.profile.kv.seconds(request.prompt_tokens) if apart else 0.0


def _throughput(case: Case, share: float) -> Iterator[Row]:
    requests = [replace(one, at_s=0.0) for one in case.workload.at(1.0, case.count, 1)]
    run = simulate(case.layout, case.profile, requests, options=case.options(None))
    yield {**case.about, "done_rps": case.count / run.span_s}


_SIMULATED: Mapping[str, Callable[[Case, float], Iterator[Row]]] = {
    "goodput": _goodput,
    "attainment": _attainment,
    "latency": _latency,
    "breakdown": _breakdown,
    "throughput": _throughput,
    "devices": _devices,
}


def rows_of(preset: Preset, *, quick: bool) -> list[Row]:
    """What came of it. Raises ConfigError: a layout that the profile does not know, a workload that there is not."""
    if preset.reading in ARITHMETIC:
        return list(ARITHMETIC[preset.reading](preset))
    reading = _SIMULATED[preset.reading]
    return [row for case in cases(preset, quick=quick) for row in reading(case, preset.share)]
