"""What requests tell Prometheus at their end: how long their phases took, by path and modality, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.config.limits import Slo
from proxy.metrics import LabelledCounter, LabelledHistogram
from proxy.records.minute import SLO, attains, is_judged
from proxy.records.record import Record

NO_PATH = "none"
"""Of a request that no stage was asked for an answer to."""

MAX_CODES = 64
"""Codes that are told apart: some are stages' words."""

OTHER = "other"
BY = ("path", "modality")
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1)


class RequestMetrics(Collector):
    """Of one process: `ended` takes records, the registry collects.

    Labels: `status` is the HTTP status, `cancelled`, or `broken` (failed mid-stream); `path` that of the last attempt,
    or `none`; `modality` is `text`, or what the request has items of, such as `image+video`.
    """

    def __init__(self, slo: Slo = SLO) -> None:
        self._slos = tuple(dict.fromkeys(slo.objectives()))  # one, where the mean judges
        self._requests = LabelledCounter("epd_proxy_requests", "Requests ended.", ("endpoint", "status"))
        self._errors = LabelledCounter(
            "epd_proxy_errors",
            "Requests that ended in an error, by its code: refusals (429, 503), failures, and mistakes of clients.",
            ("status", "code"),
        )
        self._failures = LabelledCounter(
            "epd_proxy_stage_failures",
            "Calls to an instance that failed, by the error's code, also where another attempt helped.",
            ("instance", "code"),
        )
        self._tokens = LabelledCounter(
            "epd_proxy_tokens",
            "Tokens of prompts, those of them that a prefix cache had, and tokens of answers, as far as stages say.",
            ("kind", *BY),
        )
        self._phases = LabelledHistogram(
            "epd_proxy_phase_seconds",
            "How long a phase took in all of a request's life: `body` arriving, `media`, `queue`, `encode`, `prefill`. "
            "Phases overlap.",
            ("phase", *BY),
        )
        self._ttft = LabelledHistogram(
            "epd_proxy_ttft_seconds",
            "From the request's arrival to the first token of its stream, whichever instance that is from.",
            BY,
        )
        self._tpot = LabelledHistogram(
            "epd_proxy_tpot_seconds",
            "Time per token after the first, the mean of each stream, of streams of one answer.",
            BY,
            buckets=TOKEN_SECONDS,
        )
        self._objectives = LabelledCounter(
            "epd_proxy_slo_requests",
            "Streamed answers, and whatever else failed of this server: whether they were within slo.ttft_s and "
            "slo.tpot_s, by the judge of their token gaps that is set (slo.judge), and by the mean.",
            ("judge", "attained"),
        )
        self._total = LabelledHistogram(
            "epd_proxy_request_seconds", "From the arrival to the end of the answer, of requests with status 200.", BY
        )
        self._codes: set[str] = set()

    def ended(self, record: Record) -> None:
        """Count it."""
        by = record.path or NO_PATH, record.modality
        self._requests.labels(record.endpoint, record.outcome).inc()
        if record.code:
            self._errors.labels(record.outcome, self._known(record.code)).inc()
        for stage, code in record.failures:
            self._failures.labels(stage, self._known(code)).inc()
        for phase, phase_s in record.phases_s().items():
            self._phases.labels(phase, *by).observe(phase_s)
        tokens = record.tokens_sent
        token_s = record.token_s(tokens)
        if is_judged(record):
            for slo in self._slos:
                self._objectives.labels(slo.judge, "yes" if attains(record, token_s, slo) else "no").inc()
        if record.first_byte_s is not None:
            self._ttft.labels(*by).observe(record.first_byte_s)
            if token_s is not None:
                self._tpot.labels(*by).observe(token_s)
        if record.outcome == "200":
            self._total.labels(*by).observe(record.total_s)
        for kind, count in (("prompt", record.prompt_tokens), ("cached", record.cached_tokens), ("answer", tokens)):
            if count:
                self._tokens.labels(kind, *by).inc(count)

    def collect(self) -> Iterator[Metric]:
        for family in (
            self._requests, self._errors, self._failures, self._tokens, self._objectives,
            self._phases, self._ttft, self._tpot, self._total,
        ):  # fmt: skip
            yield from family.collect()

    def _known(self, code: str) -> str:
        if code not in self._codes:
            if len(self._codes) >= MAX_CODES:
                return OTHER
            self._codes.add(code)
        return code
