"""The requests of an emulation: the same ones for every layout, made once for each seed and rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.workloads.arrivals import Poisson, with_arrivals
from bench.workloads.generate import Knobs
from bench.workloads.spec import ImageRef, RequestSpec
from bench.workloads.workload import Workload

WORKLOAD = "sharegpt4o-like"


class Loads:
    """Of one workload.

    Args:
        count: requests of a run.
        size: of every picture, instead of the workload's own sizes.
    """

    def __init__(self, count: int, *, size: tuple[int, int] | None = None, workload: str = WORKLOAD) -> None:
        self._count, self._size, self._workload = count, size, workload
        self._made: dict[int, Sequence[RequestSpec]] = {}

    def at(self, rate_rps: float, seed: int) -> Sequence[RequestSpec]:
        """Poisson arrivals of so many requests a second in all."""
        if seed not in self._made:
            requests = Workload(self._workload, self._count, Knobs(seed)).requests()
            self._made[seed] = [self._resized(request) for request in requests]
        return list(with_arrivals(self._made[seed], Poisson(rate_rps), seed))

    def _resized(self, request: RequestSpec) -> RequestSpec:
        if self._size is None:
            return request
        width, height = self._size

        def resized(picture: ImageRef) -> ImageRef:
            return replace(picture, width=width, height=height)

        return replace(request, images=tuple(map(resized, request.images)))
