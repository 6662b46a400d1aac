"""How workers learn of the deployment: whoever decides publishes a roster, a worker's table takes it in.

Only what the parent says travels (which instances there are, whether they answer, drain, or new requests wait). What
the stages say of themselves every process hears itself, and what requests hold is in the shared counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from epd_serve.instances import IncarnationId, Instance
from epd_serve.roles import Role
from proxy.registry.table import InstanceTable
from proxy.workers.wire import Roster, Row


class Publisher:
    """The roster, and a table of this process that goes by it.

    Args:
        slot_of: where an incarnation is counted.
        after: the largest number of a roster that somebody before has published.
        goes_on: workers have used the links between those that serve at first already.

    Attributes:
        number: of the present roster; 0 while nobody has said anything, and there is none.
        on_change: called when it is another one.
        leaving: ids that are given nothing new by `drain`.
    """

    def __init__(
        self,
        table: InstanceTable,
        slot_of: Callable[[IncarnationId], int] = lambda _: 0,
        *,
        after: int = 0,
        goes_on: bool = False,
    ) -> None:
        self.number = 0
        self.on_change: Callable[[], None] = lambda: None
        self.leaving: frozenset[str] = frozenset()
        self._table = table
        self._follower = WorkerRoster(table)
        self._slot_of = slot_of
        self._after = after
        self._goes_on = goes_on
        self._said: tuple[Row, ...] = ()
        self._rows: tuple[Row, ...] = ()
        self._wanted: frozenset[Role] = frozenset()

    def publish(self, rows: Iterable[Row], wanted: Iterable[Role]) -> None:
        """Everything that there is, and the roles that there are to be."""
        self._said = tuple(rows)
        self.leaving &= {row.instance.id for row in self._said}
        self._tell(frozenset(wanted))

    def drain(self, id: str, draining: bool = True) -> None:
        """Give an instance nothing new, until it is taken back or gone; what it has goes on."""
        self.leaving = self.leaving | {id} if draining else self.leaving - {id}
        if self.number:
            self._tell(self._wanted)

    def pause(self, seconds: float) -> None:
        """Have new requests wait for so long at most."""
        self._table.pause_for(seconds)
        if self.number:
            self._changed()

    def roster(self, down: Mapping[str, str]) -> Roster:
        """What workers are to know. `down`: tasks of this process that do not run, and why."""
        rows = tuple(replace(row, served=self._table.is_up(row.instance.id)) for row in self._rows)
        return Roster(self.number, rows, self._wanted, self._table.pause.left_s, dict(down))

    def _tell(self, wanted: frozenset[Role]) -> None:
        rows = tuple(
            replace(
                row,
                draining=row.draining or row.instance.id in self.leaving,
                slot=self._slot_of(row.instance.incarnation_id),
            )
            for row in self._said
        )
        if (rows, wanted) != (self._rows, self._wanted) or not self.number:
            self._rows, self._wanted = rows, wanted
            served = tuple(replace(row, served=self._goes_on) for row in rows)
            self._goes_on = False  # who comes later has links that nobody has used
            self._follower.take_in(Roster(0, served, wanted, self._table.pause.left_s))
            self._changed()

    def _changed(self) -> None:
        self.number = max(self.number, self._after) + 1
        self.on_change()


class WorkerRoster:
    """Keeps a table as the last roster says."""

    def __init__(self, table: InstanceTable) -> None:
        self._table = table
        self._rows: dict[str, Row] = {}

    def take_in(self, roster: Roster) -> None:
        """Takes in the latest roster, in the table's event loop. An instance that is new here and serves elsewhere
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
