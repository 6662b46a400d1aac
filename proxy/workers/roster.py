"""How workers learn of the deployment: the parent's table keeps a roster for them, a worker's table takes it in.

Only what the parent says travels (which instances there are, whether they answer, drain, or new requests wait). What
the stages say of themselves every process hears itself, and what requests hold is in the shared counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.registry.table import InstanceTable
from proxy.workers.wire import Roster, Row


class ParentTable(InstanceTable):
    """An instance table that calls `on_change` when its roster is another one than before.

    Args:
        after: the largest number of a roster that another table before this one has given.
        options: those of `InstanceTable`.

    Attributes:
        number: of the present roster; 0 while nobody has said anything, and there is none.
    """

    def __init__(self, *, after: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self._after = after
        self._published: dict[str, tuple[Instance, bool, str]] = {}
        self.number = 0
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
        self._changed()

    def drain(self, instance_id: str, draining: bool = True) -> None:
        if self._states[instance_id].draining is not draining:
            super().drain(instance_id, draining)
            self._changed()

    def want(self, roles: Iterable[Role]) -> None:
        before = self._wanted
        super().want(roles)
        if self._wanted != before or not self.number:
            self._changed()

    def pause_for(self, duration_s: float) -> None:
        super().pause_for(duration_s)
        self._changed()

    def roster(self, down: Mapping[str, str]) -> Roster:
        """What workers are to know; instances in order. `down`: tasks of this process that do not run, and why."""
        rows = tuple(
            Row(instance, healthy, reason, self._states[instance.id].up, self._states[instance.id].draining)
            for instance, healthy, reason in self._published.values()
        )
        return Roster(self.number, rows, self._wanted, self.pause.left_s, dict(down))

    def _tell(self, instance: Instance, healthy: bool, reason: str) -> None:
        row = (instance, healthy, reason)
        if self._published.get(instance.id) != row:  # a poller repeats itself every second
            self._published[instance.id] = row
            self._changed()

    def _changed(self) -> None:
        self.number = max(self.number, self._after) + 1
        self.on_change()


class WorkerRoster:
    """Keeps a worker's table as the last roster says."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table
        self._rows: dict[str, Row] = {}

    def take_in(self, roster: Roster) -> None:
        """Takes in the latest roster, in the worker's event loop. An instance that is new here and serves elsewhere
        serves here at once."""
        now = {row.instance.id: row for row in roster.rows}
        for gone in self._rows.keys() - now.keys():
            self._table.remove(gone)
            del self._rows[gone]
        changed = [row for row in now.values() if self._is_news(row)]
        for row in changed:
            self._table.apply(row.instance, up=row.healthy and row.served)
            self._table.drain(row.instance.id, row.draining)
            self._rows[row.instance.id] = row
        for row in changed:  # once all are known: who is up may have to wait for its links to others
            if row.healthy:
                self._table.mark_up(row.instance.id)
            else:
                self._table.mark_down(row.instance.id, row.reason)
        self._table.want(roster.wanted)
        if roster.paused_s or self._table.pause.left_s:
            self._table.pause_for(roster.paused_s)

    def _is_news(self, row: Row) -> bool:
        before = self._rows.get(row.instance.id)
        return before is None or _content(before) != _content(row)


def _content(row: Row) -> tuple[Instance, bool, str, bool]:
    return row.instance, row.healthy, row.reason, row.draining
