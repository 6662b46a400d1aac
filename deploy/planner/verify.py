"""`plan --verify`: the first choice and the best monolith served for real, and what was predicted beside what came.

Traffic is the plan's: its sizes, its arrivals at a share of the predicted goodput, prompts that no two times are alike.
One layout after the other, each a launch of its own, loaded from a thread per request under way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from deploy.memory.placement_table import table
from deploy.planner.choice import Choice, Plan
from deploy.planner.goodput import Goal, Times, times_of
from deploy.planner.served import Launched, launched
from deploy.planner.simulate import Served, Simulated
from deploy.planner.told import options_of
from epd_serve.slo import gaps_within
from epd_serve.traffic import Request

SHARE = 0.8
"""Of the predicted goodput."""
SEED = 1_000_003
"""Of no simulation that the plan was made from."""
TOGETHER = 512
SIDE = 28.0
"""Of a token in pixels, where nobody knows the size of an item."""


def verified(plan: Plan, flags: Sequence[str], seconds: float) -> Iterator[str]:
    """A table per layout. `flags`: of `epd-serve serve`, the model too. Raises StageError: a launch fails."""
    yield _compared(plan.first, plan.question.goal, *_both(plan, plan.first, flags, seconds))
    if plan.monolith is not None and plan.monolith is not plan.first:
        yield _compared(plan.monolith, plan.question.goal, *_both(plan, plan.monolith, flags, seconds))


def _both(plan: Plan, one: Choice, flags: Sequence[str], seconds: float) -> tuple[Times, Times, float]:
    goal, rate_rps = plan.question.goal, SHARE * one.goodput.value
    requests = goal.workload.at(rate_rps, max(20, round(rate_rps * seconds)), SEED)
    with launched(str(one.layout), [*flags, *options_of(one, plan.question)]) as served:
        for request in requests[:4]:
            _send(served, request, time.monotonic())  # first uses
        measured = _sent(served, requests, goal)
    predicted = goal.simulated(one.layout, plan.question.profile, requests, one.options)
    return times_of(predicted, goal), times_of(measured, goal), rate_rps


def _sent(served: Launched, requests: Sequence[Request], goal: Goal) -> Simulated:
    """All of them, each when it is due, in the form in which the simulator tells of them."""
    begun_s = time.monotonic()

    def due(request: Request) -> Served:
        time.sleep(max(0.0, begun_s + request.at_s - time.monotonic()))
        token_s = _send(served, request, begun_s)
        gaps, within = gaps_within(token_s, goal.slo.tpot_ms / 1e3)
        return Served(request.id, request.at_s, token_s[0], token_s[-1], request.output_tokens, gaps, (within,))

    with ThreadPoolExecutor(min(TOGETHER, len(requests))) as pool:
        found = list(pool.map(due, requests))
    return Simulated((goal.slo,), found, max(one.last_s for one in found), {})


def _send(served: Launched, request: Request, begun_s: float) -> list[float]:
    """When each event with content was read, since the beginning."""
    sides = ((item, round(SIDE * math.sqrt(item.tokens))) for item in request.items)
    sizes = [(item.width or side, item.height or side) for item, side in sides]
    return [at_s - begun_s for at_s in served.streamed(sizes, request.text_tokens, request.output_tokens)]


def _compared(one: Choice, goal: Goal, predicted: Times, measured: Times, rate_rps: float) -> str:
    rows = [(f"{one.layout} at {rate_rps:.3g}/s", "predicted", "measured", "off by")]
    for name in ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2e_p50"):
        said, found = getattr(predicted, name), getattr(measured, name)
        rows.append((f"{name.replace('_', ' ')}, ms", f"{said:.1f}", f"{found:.1f}", f"{said / found - 1:+.0%}"))
    rows.append((f"within {goal.slo}", f"{predicted.attained:.1%}", f"{measured.attained:.1%}", ""))
    return table(rows)
