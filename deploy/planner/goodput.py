"""How much traffic a layout serves within an SLO: the highest rate at which enough requests attain it. Pure.

Goodput as HydraInfer (§5.2) and EPD (§3.3.3, f of Eq. 6) have it. All layouts are given the same requests, so that what
differs between two is the layouts'; several seeds say how much of a figure is chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deploy.planner.fleet import Options
from deploy.planner.profile import DeviceProfile
from deploy.planner.simulate import Served, Simulated, simulate
from deploy.planner.workload import Workload
from epd_serve.layout import Layout
from epd_serve.slo import Slo
from epd_serve.traffic import Request

SHARE = 0.9
"""Of requests within the SLO."""
CLOSE = 1.08
"""The search ends when the rate that misses is at most so many times the one that meets."""
LEAST_DEVICES = 4
"""Of a part of a layout that is simulated instead of it."""
STEP = 1.15
LEAST_REQUESTS, MOST_REQUESTS = 240, 1500
SPAN = 5.0
"""Seconds of traffic: so many times the TTFT of the SLO. The queue of a stage that is too slow grows beyond it in a
fraction of that."""
SETTLING = 0.1
"""Of the requests, that come before queues are as long as they will be: not judged."""
T_90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}
"""Student's t of a 90 % interval, by degrees of freedom."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, with the interval that has it in nine cases of ten; one seed has no width."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean, mean, mean)
        freedom = len(values) - 1
        off = T_90[min(freedom, max(T_90))] * statistics.stdev(values) / len(values) ** 0.5
        return cls(mean, max(0.0, mean - off), mean + off)

    def widened(self, share: float) -> Interval:
        """By so much of itself to both sides."""
        return Interval(self.value, self.low * (1 - share), self.high * (1 + share))

    def meets(self, other: Interval) -> bool:
        """Whether they have values in common."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Goal:
    """What is asked of every layout. share: of requests that are to attain the SLO."""

    workload: Workload
    slo: Slo
    share: float = SHARE

    def requests(self, rate_rps: float, seed: int) -> Sequence[Request]:
        """Of a run at this rate."""
        span_s = SPAN * self.slo.ttft_ms / 1e3
        return self.workload.at(rate_rps, min(max(LEAST_REQUESTS, round(rate_rps * span_s)), MOST_REQUESTS), seed)

    def run(self, layout: Layout, profile: DeviceProfile, rate_rps: float, seed: int, options: Options) -> Simulated:
        return self.simulated(layout, profile, self.requests(rate_rps, seed), options)

    def simulated(
        self, layout: Layout, profile: DeviceProfile, requests: Sequence[Request], options: Options
    ) -> Simulated:
        return simulate(layout, profile, requests, slos=(self.slo,), options=options)

    def met(self, layout: Layout, profile: DeviceProfile, rate_rps: float, seed: int, options: Options) -> bool:
        """Whether enough requests attain the SLO. The run ends where that is certain, whatever became of the rest."""
        requests = self.requests(rate_rps, seed)
        judged = {one.id for one in requests[_settling(requests) :]}
        attained = missed = 0

        def certain(one: Served) -> bool:
            nonlocal attained, missed
            if one.id in judged:
                keeps = self.slo.attained(one.ttft_s, one.tpot_s, one.gaps, one.within[0])
                attained, missed = attained + keeps, missed + (not keeps)
            count = len(judged)
            return attained / count >= self.share or (count - missed) / count < self.share

        run = simulate(layout, profile, requests, slos=(self.slo,), options=options, until=certain)
        return self.attained(run) >= self.share

    def attained(self, run: Simulated) -> float:
        """The share of the requests that are judged."""
        return run.attained(0, since=_settling(run.served))


def _settling(run: Sequence[object]) -> int:
    """How many of the first requests are not judged."""
    return round(SETTLING * len(run))


def part_of(layout: Layout) -> tuple[Layout, int]:
    """The smallest layout of `LEAST_DEVICES` or more that the whole is a multiple of, and how many times: a part with
    its part of the traffic stands for all. Queues of the whole are no longer than those of its parts."""
    most = math.gcd(*(group.repeat for group in layout.groups))
    fits = (
        times for times in range(most, 0, -1) if most % times == 0 and layout.device_count // times >= LEAST_DEVICES
    )
    times = next(fits, 1)
    return Layout.of(replace(group, repeat=group.repeat // times) for group in layout.groups), times


def serves(
    goal: Goal, layout: Layout, profile: DeviceProfile, rate_rps: float, seed: int, options: Options = Options()
) -> bool:
    """Whether it serves so much within the SLO, by one run."""
    part, times = part_of(layout)
    return goal.met(part, profile, rate_rps / times, seed, options)


def goodput(
    goal: Goal,
    layout: Layout,
    profile: DeviceProfile,
    start_rps: float,
    seed: int,
    options: Options = Options(),
) -> float:
    """Requests a second. Goes up or down from `start_rps`, by larger steps each time, until one rate meets the goal and
    one does not, then halves between them; 0 where no rate down to a thousandth of it does.
    """
    met, missed, rate, step = 0.0, math.inf, start_rps, STEP
    while missed > CLOSE * met and start_rps / 1024 <= rate <= 1024 * start_rps:
        if serves(goal, layout, profile, rate, seed, options):
            met = rate
        else:
            missed = rate
        if math.isinf(missed) or not met:
            rate = rate * step if met else rate / step
            step *= step
        else:
            rate = (met + missed) / 2
    return met


@dataclass(frozen=True)
class Times:
    """Of a run at a rate: milliseconds.

    Attributes:
        ttft_p50, ttft_p90, tpot_p50, tpot_p90, e2e_p50: of the requests. attained: share of them.
        late, slow: share whose first token was late, whose gaps were too long; of a choice just beyond its goodput.
        busy: by instance and kind of work, the share of the time.
    """

    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float
    e2e_p50: float
    attained: float
    late: float
    slow: float
    busy: Mapping[str, Mapping[str, float]]


def times_of(run: Simulated, goal: Goal) -> Times:
    served = run.served[_settling(run.served) :]
    ttft = sorted(1e3 * one.ttft_s for one in served)
    tpot = sorted(1e3 * one.tpot_s for one in served if one.tpot_s is not None) or [0.0]
    late = sum(1e3 * one.ttft_s > goal.slo.ttft_ms for one in served) / len(served)
    within = (goal.slo.attained(0.0, one.tpot_s, one.gaps, one.within[0]) for one in served)
    return Times(
        *(_quantile(ttft, 0.5), _quantile(ttft, 0.9), _quantile(tpot, 0.5), _quantile(tpot, 0.9)),
        e2e_p50=_quantile(sorted(1e3 * one.e2e_s for one in served), 0.5),
        attained=goal.attained(run),
        late=late,
        slow=1 - sum(within) / len(served),
        busy=run.busy,
    )


def _quantile(ordered: Sequence[float], at: float) -> float:
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))]
