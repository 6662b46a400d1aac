"""Passes on what happens to the stages: to the run directory, the proxy's table and the screen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.launch.screen import Screen
from deploy.plan.wiring_plan import WiringPlan
from npu_ops.core_grants import CoreGrant, read_grants

if TYPE_CHECKING:
    from proxy.registry.table import InstanceTable


class StageNews:
    """A `deploy.agent.supervisor.StageEvents`."""

    def __init__(self, wired: WiringPlan, table: InstanceTable, screen: Screen) -> None:
        self._wired = wired
        self._plans = {plan.id: plan for plan in wired.blueprint.plans}
        self._table = table
        self._screen = screen
        self.grants: dict[str, tuple[CoreGrant, ...]] = {}  # of instances with a core share, those that are up

    def before_spawn(self, stage: str, incarnation: str) -> None:
        self._wired.run.clear_instance(stage)
        self._table.apply(self._wired.instance(self._plans[stage], incarnation), up=False)

    def spawned(self, stage: str, pid: int) -> None:
        self._wired.run.record_group(stage, pid)
        self._screen.started(stage)

    def phase(self, stage: str, phase: str) -> None:
        self._screen.phase(stage, phase)

    def up(self, stage: str, incarnation: str, seconds: float) -> None:
        self._hear_cores(stage, incarnation)
        self._table.mark_up(stage)
        self._screen.up(stage, seconds)

    def _hear_cores(self, stage: str, incarnation: str) -> None:
        """Whoever has a share has said by now what its workers got."""
        plan = self._plans[stage]
        if plan.core_share is None:
            return
        grants = self.grants[stage] = read_grants(self._wired.run.grant_template(stage), plan.tp)
        if len(grants) < plan.tp:
            self._screen.line(f"warning: {stage} does not say how many cores it got: its share may not be enforced")
        self._table.apply(replace(self._wired.instance(plan, incarnation), cores=grants), up=False)

    def down(self, stage: str, incarnation: str, reason: str, retry_in_s: float | None) -> None:
        self._table.mark_down(stage, reason, incarnation=incarnation)
        if retry_in_s is not None:
            self._screen.down(stage, reason, retry_in_s)
