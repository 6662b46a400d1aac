"""The command that starts a simulated stage. Pure: values in, values out."""

from __future__ import annotations

import json
import sys

from epd_serve.stage_plan import StageCommand, StagePlan


def sim_command(plan: StagePlan) -> StageCommand:
    """Lower a plan to the command that starts it. Of devices, cores and memory nothing is used."""
    return StageCommand(
        argv=(
            *(sys.executable, "-m", "epd_serve.sim"),
            *("--model", plan.model),
            *("--served-model-name", plan.served_model_name),
            *(("--uds", plan.uds) if plan.uds else ("--host", plan.host, "--port", str(plan.port))),
            *("--tensor-parallel-size", str(plan.tp)),
            *(("--scheduling-policy", "priority") if plan.role.has_language_model else ()),
            *("--wiring", json.dumps(plan.wiring.to_json())),
            *(("--profile", plan.sim_profile) if plan.sim_profile else ()),
            *(("--guarded",) if plan.guarded else ()),
            *plan.extra_args,
        ),
        env={},
    )
