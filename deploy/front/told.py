"""What a status table is told by whoever publishes all instances there are, again and again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from deploy.runtime.protocol import Observed, Phase
from epd_serve.instances import Instance
from epd_serve.roles import Role

if TYPE_CHECKING:
    from proxy.registry.table import InstanceTable


class Told:
    """Args:
    goes_on: whoever serves by the table, or by another one before it, has used the links between instances already.
    """

    def __init__(self, table: InstanceTable, *, goes_on: bool = False) -> None:
        self._table = table
        self._goes_on = goes_on
        self._known: dict[str, Instance] = {}
        self._leaving: set[str] = set()
        self._draining: set[str] = set()

    def publish(self, instances: Iterable[Observed], wanted: Iterable[Role]) -> None:
        """Everything that there is, and the roles that there are to be."""
        table = self._table
        table.want(wanted)
        present = [(one.instance, one) for one in instances if one.instance is not None]
        before, self._known = self._known, {instance.id: instance for instance, _ in present}
        for gone in before.keys() - self._known.keys():
            table.remove(gone)
            self._leaving.discard(gone)
        self._draining = {instance.id for instance, one in present if one.phase is Phase.DRAINING}
        for instance, one in present:
            name = instance.id
            if instance != before.get(name):
                table.apply(instance, up=self._goes_on and one.serves)  # its links are in use already
            self._drain(name)
            if one.serves:
                table.mark_up(name)
            else:
                table.mark_down(name, one.reason or one.phase.value)
        self._goes_on = False

    def drain(self, id: str) -> None:
        """Give an instance nothing new, until it is taken back or gone; what it has goes on."""
        self._leaving.add(id)
        self._drain(id)

    def take_back(self, id: str) -> None:
        self._leaving.discard(id)
        self._drain(id)

    @property
    def leaving(self) -> frozenset[str]:
        """Those that are given nothing new by `drain`."""
        return frozenset(self._leaving)

    def _drain(self, id: str) -> None:
        if id in self._known:
            self._table.drain(id, id in self._leaving or id in self._draining)
