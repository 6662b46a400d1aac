"""What the controller does, as Prometheus metrics, read from the reconciler at every scrape. They end with its life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deploy.control.progress import ACTIONS
from deploy.control.reconciler import Reconciler


class ControlMetrics(Collector):
    """`epd_control_*`."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler

    def collect(self) -> Iterator[Metric]:
        reconciler, changes = self._reconciler, self._reconciler.changes
        there = GaugeMetricFamily("epd_control_instances", "Instances, by role and phase.", labels=("role", "phase"))
        restarts = CounterMetricFamily(
            "epd_control_restarts",
            "Times that an instance has been started again after it ended by itself.",
            labels=("instance",),
        )
        phases = Counter((one.order.spec.role.value, one.phase.value) for one in reconciler.instances)
        for labels, count in phases.items():
            there.add_metric(labels, count)
        for one in reconciler.instances:
            restarts.add_metric((one.order.id,), one.restarts)
        yield there
        yield restarts

        running = GaugeMetricFamily("epd_control_actions_running", "Actions under way, by kind.", labels=("action",))
        ended = CounterMetricFamily(
            "epd_control_actions",
            "Actions of changes that have ended, by kind and outcome: `done` or `failed`.",
            labels=("action", "outcome"),
        )
        over = CounterMetricFamily(
            "epd_control_changes",
            "Changes that are over, by command and how they ended: `done`, `failed` or `undone`.",
            labels=("change", "outcome"),
        )
        under_way = Counter(changes.present.running if changes.present is not None else ())
        for action in ACTIONS.values():
            running.add_metric((action,), under_way[action])
        for labels, count in changes.actions().items():
            ended.add_metric(labels, count)
        for labels, count in changes.ended.items():
            over.add_metric(labels, count)
        yield running
        yield ended
        yield over

        changing = GaugeMetricFamily("epd_control_changing", "1 while a change is under way.")
        changing.add_metric((), changes.present is not None)
        paused = GaugeMetricFamily("epd_control_paused_s", "For how long new requests still wait for a change.")
        paused.add_metric((), reconciler.paused_s)
        trouble = GaugeMetricFamily("epd_control_trouble", "1 while what is wanted cannot be had: `epd-serve status`.")
        trouble.add_metric((), bool(reconciler.trouble.reason or reconciler.wanted.waits))
        yield changing
        yield paused
        yield trouble
