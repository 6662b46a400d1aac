"""Where the requests of a run come from: a file of bodies, or a workload, which makes new ones for every run.

New ones matter: a second rate with the pictures of the first would be served from caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.client.bodies import DataUrl, spec_bodies
from bench.client.measure import Plan
from bench.workloads.arrivals import ClosedLoop, with_arrivals
from bench.workloads.spec import RequestSpec

CLOSED_LOOP_REQUESTS = 512
"""That a closed loop without a count is given; they repeat where it runs on."""


@dataclass(frozen=True)
class Requests:
    """Of one run. `dues`: seconds from its start; None in a closed loop. `repeats`: bodies that an earlier run had."""

    bodies: Iterable[tuple[str, Mapping[str, Any]]]
    dues: Sequence[float] | None
    repeats: bool = False


class Source(Protocol):
    """Makes the requests of one run after another."""

    def of_run(self, plan: Plan, number: int) -> Requests: ...


class FileSource:
    """The same bodies for every run."""

    def __init__(self, bodies: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._bodies = bodies

    def of_run(self, plan: Plan, number: int) -> Requests:
        dues = None if isinstance(plan.arrivals, ClosedLoop) else plan.dues()
        return Requests(self._bodies, dues, repeats=number > 0 or (dues is not None and len(dues) > len(self._bodies)))


class WorkloadSource:
    """A workload.

    Args:
        specs: its requests from a seed, in order.
        repeats: every run has the requests of the first.
    """

    def __init__(
        self,
        specs: Callable[[int], Iterable[RequestSpec]],
        data_url: DataUrl,
        model: str,
        seed: int,
        *,
        repeats: bool = False,
    ) -> None:
        self._specs, self._data_url = specs, data_url
        self._model, self._seed, self._repeats = model, seed, repeats

    def of_run(self, plan: Plan, number: int) -> Requests:
        seed = self._seed if self._repeats else self._seed + number
        dated = with_arrivals(self._specs(seed), plan.arrivals, plan.seed)
        specs = list(_until_the_end(dated, plan))
        bodies = spec_bodies(specs, self._model, self._data_url)
        dues = [spec.arrival_s for spec in specs if spec.arrival_s is not None]
        return Requests(bodies, dues or None, repeats=self._repeats and number > 0)


def _until_the_end(specs: Iterator[RequestSpec], plan: Plan) -> Iterator[RequestSpec]:
    """The requests of a workload that the plan sends."""
    if isinstance(plan.arrivals, ClosedLoop):
        return itertools.islice(specs, plan.count or CLOSED_LOOP_REQUESTS)
    until = float("inf") if plan.seconds is None else plan.seconds
    return itertools.takewhile(lambda spec: (spec.arrival_s or 0.0) < until, itertools.islice(specs, plan.count))
