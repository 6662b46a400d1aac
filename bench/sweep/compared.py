"""What a sweep says of each layout, beside plain vLLM and beside the monolith; the same over several seeds. Pure.

Figures are called `<deployment>/<rate> rps/…`:

    attained_mean, attained_gaps   share of the requests within the first objective, by their mean time per token, and
                                   by the gaps between their tokens
    ttft_over_…, tpot_over_…, e2e_over_…   means over those of …: `vllm`, plain servers on as many devices, or
                                   `monolith`, the layout of as many monoliths
    itl_p99_over_…                 P99 of the gaps between tokens, likewise
    goodput_over_…                 tokens a second of requests within the objective, by gaps; `mean_goodput_…`: by the
                                   mean

What one of both has not, or has none of, is left out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.sweep.experiment import Deployment, Experiment, ServedBy
from epd_serve.layout_parser import parse
from epd_serve.roles import Role
from epd_serve.slo import MEAN

Figures = Mapping[str, float]

TIMES = {"ttft": "ttft_ms/mean", "tpot": "tpot_ms/mean", "e2e": "e2e_ms/mean", "itl_p99": "itl_ms/p99"}
GOODPUT = "effective_tokens_per_s"


def compared(experiment: Experiment, figures: Figures) -> dict[str, float]:
    """The figures above.

    Args:
        figures: of all deployments, as `bench.sweep.store.summary` names them.
    """
    slo = experiment.slos[0]
    gaps, mean = (f"slo_{one}" for one in (slo, replace(slo, judge=MEAN)))
    of = {**TIMES, "goodput": f"{gaps}/{GOODPUT}", "mean_goodput": f"{mean}/{GOODPUT}"}
    found: dict[str, float] = {}
    for one in experiment.deployments:
        bases = {"vllm": _of(experiment, one, ServedBy.VLLM), "monolith": _of(experiment, one, ServedBy.LAYOUT)}
        for label in (run.label for run in experiment.runs(one)):
            here = f"{one.name}/{label}/"
            for name, objective in (("attained_mean", mean), ("attained_gaps", gaps)):
                if (share := figures.get(f"{here}{objective}/attainment")) is not None:
                    found[here + name] = share
            for (called, base), (name, figure) in itertools.product(bases.items(), of.items()):
                if base is None or base is one:
                    continue
                mine, theirs = figures.get(here + figure), figures.get(f"{base.name}/{label}/{figure}")
                if mine is not None and theirs:
                    found[f"{here}{name}_over_{called}"] = round(mine / theirs, 4)
    return found


def _of(experiment: Experiment, like: Deployment, served_by: ServedBy) -> Deployment | None:
    """The monoliths with as many devices: ours, or plain vLLM's."""
    return next(
        (
            one
            for one in experiment.deployments
            if one.served_by is served_by and one.devices == like.devices and parse(one.layout).roles == {Role.EPD}
        ),
        None,
    )


def over_seeds(each: Sequence[Figures]) -> dict[str, float]:
    """The median of each figure over the seeds that have it; beside it, where they differ, `…_least` and `…_most`."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for figures in each for name in figures):
        values = [figures[name] for figures in each if name in figures]
        found[name] = statistics.median(values)
        if min(values) < max(values):
            found |= {f"{name}_least": min(values), f"{name}_most": max(values)}
    return found
