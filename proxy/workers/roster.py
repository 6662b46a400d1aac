"""How workers learn of the instances: the parent's table keeps rows for them, a worker's table takes these in.

Only what the launcher says travels (which instances there are, whether they answer). What the stages say of themselves
every process hears itself, and what requests hold is in the shared counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from epd_serve.instances import Instance
from proxy.registry.table import InstanceTable
from proxy.workers.wire import Row


class ParentTable(InstanceTable):
    """An instance table that calls `on_change` when its `rows` are others than before.

    Args:
        options: those of `InstanceTable`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._published: dict[str, tuple[Instance, bool, str]] = {}
        self.on_change: Callable[[], None] = lambda: None

    def apply(self, instance: Instance, *, up: bool = True) -> None:
        super().apply(instance, up=up)
        row = self._published.get(instance.id)
        if row is not None and row[0].incarnation == instance.incarnation:
            self._tell(instance, *row[1:])
        else:
            self._tell(instance, up, "" if up else "starting")

    def mark_up(self, instance_id: str) -> None:
        super().mark_up(instance_id)
        self._tell(self._published[instance_id][0], True, "")

    def mark_down(self, instance_id: str, reason: str, *, incarnation: str | None = None) -> None:
        super().mark_down(instance_id, reason, incarnation=incarnation)
        instance = self._published[instance_id][0]
        if incarnation is None or incarnation == instance.incarnation:
            self._tell(instance, False, reason)

    def remove(self, instance_id: str) -> None:
        super().remove(instance_id)
        del self._published[instance_id]
        self.on_change()

    def rows(self) -> tuple[Row, ...]:
        """What workers are to know, in order."""
        served = {view.instance.id for view in self.snapshot() if view.up}
        return tuple(
            Row(instance, healthy, reason, served=instance.id in served)
            for instance, healthy, reason in self._published.values()
        )

    def _tell(self, instance: Instance, healthy: bool, reason: str) -> None:
        row = (instance, healthy, reason)
        if self._published.get(instance.id) != row:  # a poller repeats itself every second
            self._published[instance.id] = row
            self.on_change()


class WorkerRoster:
    """Keeps a worker's table as the last roster says."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table
        self._rows: dict[str, Row] = {}

    def take_in(self, rows: Iterable[Row]) -> None:
        """Takes in the latest roster, in the worker's event loop. An instance that is new here and serves elsewhere
        serves here at once."""
        now = {row.instance.id: row for row in rows}
        for gone in self._rows.keys() - now.keys():
            self._table.remove(gone)
        for instance_id, row in now.items():
            before = self._rows.get(instance_id)
            if before is not None and _content(before) == _content(row):
                continue
            self._table.apply(row.instance, up=row.healthy and row.served)
            if row.healthy:
                self._table.mark_up(instance_id)
            else:
                self._table.mark_down(instance_id, row.reason)
        self._rows = now


def _content(row: Row) -> tuple[Instance, bool, str]:
    return row.instance, row.healthy, row.reason
