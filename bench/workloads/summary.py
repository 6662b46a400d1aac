"""The statistics of a sample of requests, under the names that `Fact` uses. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bench.workloads.spec import RequestSpec


@dataclass(frozen=True)
class Summary:
    """Images are counted as they occur, repeats included; widths and heights of no image at all are 0.

    Attributes:
        reuse: share of occurrences whose image occurred before.
        rate_rps: requests a second between the first and the last arrival; 0 without arrivals.
    """

    requests: int
    text_only_share: float
    text_tokens_mean: float
    output_tokens_mean: float
    images_mean: float
    images_min: int
    images_max: int
    width_mean: float
    height_mean: float
    width_median: float
    height_median: float
    width_p95: float
    height_p95: float
    width_max: int
    height_max: int
    reuse: float
    rate_rps: float


def summarise(requests: Iterable[RequestSpec]) -> Summary:
    """Summarises a finite sample of one request or more."""
    sample = list(requests)
    assert sample
    images = [image for request in sample for image in request.images]
    sizes = np.array([(image.width, image.height) for image in images] or [(0, 0)])  # [images, 2]
    counts = [len(request.images) for request in sample]
    times = [request.arrival_s for request in sample if request.arrival_s is not None]
    span_s = times[-1] - times[0] if times else 0.0
    mean, median, p95, most = (
        found.tolist()
        for found in (
            sizes.mean(0),
            np.median(sizes, 0),
            np.percentile(sizes, 95, axis=0, method="inverted_cdf"),
            sizes.max(0),
        )
    )
    return Summary(
        requests=len(sample),
        text_only_share=sum(request.text_only for request in sample) / len(sample),
        text_tokens_mean=float(np.mean([request.text_tokens for request in sample])),
        output_tokens_mean=float(np.mean([request.max_tokens for request in sample])),
        images_mean=float(np.mean(counts)),
        images_min=min(counts),
        images_max=max(counts),
        width_mean=mean[0],
        height_mean=mean[1],
        width_median=median[0],
        height_median=median[1],
        width_p95=p95[0],
        height_p95=p95[1],
        width_max=most[0],
        height_max=most[1],
        reuse=1 - len(set(images)) / len(images) if images else 0.0,
        rate_rps=(len(times) - 1) / span_s if span_s else 0.0,
    )
