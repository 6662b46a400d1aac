"""Plans of stages for tests."""

from __future__ import annotations

from epd_serve.roles import Role
from epd_serve.stage_plan import StagePlan
from epd_serve.wiring import StageWiring


def plan_of(engine: str, role: Role = Role.P, **more: object) -> StagePlan:
    return StagePlan(
        instance=f"{role}0",
        role=role,
        device="cpu",
        device_ids=(0, 1),
        cores=(),
        tp=2,
        model="a-model",
        served_model_name="a-name",
        port=8101,
        host="127.0.0.1",
        wiring=StageWiring(instance=f"{role}0", role=role, incarnation="life"),
        engine=engine,
        **more,  # type: ignore[arg-type]
    )
