"""The statistics of a sample of requests, under the names that `Fact` uses. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from bench.statistic import percentile
from bench.workloads.spec import PictureRef, RequestSpec


@dataclass(frozen=True)
class Summary:
    """Pictures are counted as they occur, repeats included; widths and heights of no picture at all are 0.

    Attributes:
        reuse: share of occurrences whose picture occurred before.
        rate_rps: requests a second between the first and the last arrival; 0 without arrivals.
    """

    requests: int
    text_only_share: float
    text_tokens_mean: float
    output_tokens_mean: float
    pictures_mean: float
    pictures_min: int
    pictures_max: int
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
    """Of a finite sample of one request or more."""
    sample = list(requests)
    assert sample
    shown = [picture for request in sample for picture in request.pictures]
    widths, heights = [one.width for one in shown] or [0], [one.height for one in shown] or [0]
    counts = [len(request.pictures) for request in sample]
    times = [request.arrival_s for request in sample if request.arrival_s is not None]
    span_s = times[-1] - times[0] if len(times) > 1 else 0.0
    return Summary(
        requests=len(sample),
        text_only_share=sum(request.text_only for request in sample) / len(sample),
        text_tokens_mean=statistics.fmean(request.text_tokens for request in sample),
        output_tokens_mean=statistics.fmean(request.max_tokens for request in sample),
        pictures_mean=statistics.fmean(counts),
        pictures_min=min(counts),
        pictures_max=max(counts),
        width_mean=statistics.fmean(widths),
        height_mean=statistics.fmean(heights),
        width_median=statistics.median(widths),
        height_median=statistics.median(heights),
        width_p95=percentile(widths, 95),
        height_p95=percentile(heights, 95),
        width_max=max(widths),
        height_max=max(heights),
        reuse=_repeats(shown) / len(shown) if shown else 0.0,
        rate_rps=(len(times) - 1) / span_s if span_s else 0.0,
    )


def _repeats(shown: list[PictureRef]) -> int:
    return len(shown) - len(set(shown))
