"""Metrics of several proxy processes as one: what each has counted is added up. Pure, but for reading a registry.

Metrics named `epd_proxy_…` are counted by the process that has them. All others are read from the status table, which
says the same in every process: they are nobody's to add.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.workers.wire import Family

COUNTED_PREFIX = "epd_proxy_"
_CREATED = "_created"
_LASTING = ("counter", "histogram", "summary")

_Key = tuple[str, tuple[tuple[str, str], ...]]


def own_counts(registry: CollectorRegistry) -> list[Family]:
    """What this process has counted until now."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [(sample.name, tuple(sample.labels.items()), float(sample.value)) for sample in metric.samples],
        )
        for metric in registry.collect()
        if metric.name.startswith(COUNTED_PREFIX)
    ]


def summed(parts: Iterable[Iterable[Family]]) -> list[Family]:
    """The sum of several processes' counts, sample by sample. A creation time is the earliest."""
    families: dict[str, Family] = {}
    sums: dict[str, dict[_Key, float]] = {}
    for part in parts:
        for family in part:
            families.setdefault(family.name, family)
            values = sums.setdefault(family.name, {})
            for name, labels, value in family.samples:
                so_far = values.get((name, labels))
                if so_far is None:
                    values[name, labels] = value
                else:
                    values[name, labels] = min(so_far, value) if name.endswith(_CREATED) else so_far + value
    return [
        Family(name, one.kind, one.help, [(*key, value) for key, value in sums[name].items()])
        for name, one in families.items()
    ]


def lasting(families: Iterable[Family]) -> list[Family]:
    """What remains of the counts of a process that has ended: what it did, not what it held."""
    return [family for family in families if family.kind in _LASTING]


def exposition(registry: CollectorRegistry, together: Iterable[Family]) -> bytes:
    """Prometheus text format: `together` in the place of what this process has counted, and the table's metrics."""
    return generate_latest(_Together(registry, list(together)))


class _Together(Collector):
    def __init__(self, registry: CollectorRegistry, together: list[Family]) -> None:
        self._registry = registry
        self._together = together

    def collect(self) -> Iterator[Metric]:
        for family in self._together:
            metric = Metric(family.name, family.help, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric
        for own in self._registry.collect():
            if not own.name.startswith(COUNTED_PREFIX):
                yield own
