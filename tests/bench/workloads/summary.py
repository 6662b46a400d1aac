"""What requests of a workload are like: the statistics that its profile's facts are about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from bench.statistic import percentile
from bench.workloads.requests import RequestSpec


def summarise(requests: Iterable[RequestSpec]) -> dict[str, float]:
    """The statistics of one request or more, under the names that `Fact` uses.

    Images are counted as they occur, repeats included; widths and heights of no image at all are 0. `reuse` is the
    share of occurrences whose image occurred before; `rate_rps` is between the first and the last arrival, 0 without.
    """
    sample = list(requests)
    images = [image for request in sample for image in request.images]
    counts = [len(request.images) for request in sample]
    times = [request.arrival_s for request in sample if request.arrival_s is not None]
    span_s = times[-1] - times[0] if times else 0.0
    summary: dict[str, Any] = {
        "requests": len(sample),
        "text_only_share": counts.count(0) / len(sample),
        "text_tokens_mean": np.mean([request.text_tokens for request in sample]),
        "output_tokens_mean": np.mean([request.max_tokens for request in sample]),
        "images_mean": np.mean(counts),
        "images_min": min(counts),
        "images_max": max(counts),
        "reuse": 1 - len(set(images)) / len(images) if images else 0.0,
        "rate_rps": (len(times) - 1) / span_s if span_s else 0.0,
    }
    for side in ("width", "height"):
        values = [getattr(image, side) for image in images] or [0]
        summary |= {f"{side}_mean": np.mean(values), f"{side}_median": np.median(values), f"{side}_max": max(values)}
        summary[f"{side}_p95"] = percentile(values, 95)
    return {name: float(value) for name, value in summary.items()}
