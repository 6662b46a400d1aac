"""What the controller does, as Prometheus metrics, read from the reconciler at every scrape. They end with its life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deploy.control.changes import ACTIONS
from deploy.control.reconciler import Reconciler


class ControlMetrics(Collector):
    """`epd_control_*`."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler

    def collect(self) -> Iterator[Metric]:
        reconciler, changes = self._reconciler, self._reconciler.changes
        there = reconciler.instances
        running = Counter(step.word for step in changes.present.under_way) if changes.present is not None else Counter()
        yield _gauge(
            "instances",
            "Instances, by role and phase.",
            Counter((one.order.spec.role.value, one.phase.value) for one in there),
            ("role", "phase"),
        )
        yield _counter(
            "restarts",
            "Times that an instance has been started again after it ended by itself.",
            {(one.order.id,): one.restarts for one in there},
            ("instance",),
        )
        yield _gauge(
            "actions_running",
            "Actions under way, by kind.",
            {(action,): running[action] for action in ACTIONS},
            ("action",),
        )
        yield _counter(
            "actions",
            "Actions of changes that have ended, by kind and outcome: `done` or `failed`.",
            changes.actions(),
            ("action", "outcome"),
        )
        yield _counter(
            "changes",
            "Changes that are over, by command and how they ended: `done`, `failed` or `undone`.",
            changes.ended,
            ("change", "outcome"),
        )
        trouble = bool(reconciler.trouble or reconciler.wanted.waits)
        yield _gauge("changing", "1 while a change is under way.", {(): changes.present is not None})
        yield _gauge("paused_s", "For how long new requests still wait for a change.", {(): reconciler.paused_s})
        yield _gauge("trouble", "1 while what is wanted cannot be had: `epd-serve status`.", {(): trouble})


def _gauge(name: str, meaning: str, values: Mapping[Any, float], labels: Sequence[str] = ()) -> Metric:
    return _with(GaugeMetricFamily(f"epd_control_{name}", meaning, labels=labels), values)


def _counter(name: str, meaning: str, values: Mapping[Any, float], labels: Sequence[str]) -> Metric:
    return _with(CounterMetricFamily(f"epd_control_{name}", meaning, labels=labels), values)


def _with(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Any, float]) -> Metric:
    """Each value by those of its labels."""
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
