"""What can run a stage: vLLM, or a simulation of it. From a stage's plan to its command, and which profile is meant."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from epd_serve.engine.argv import stage_command
from epd_serve.errors import ConfigError
from epd_serve.sim.profile import read_profile
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


def command_of(plan: StagePlan) -> StageCommand:
    """Lower a plan to the command that starts it, by its engine."""
    return sim_command(plan) if plan.engine == "sim" else stage_command(plan)


def checked_profile(engine: str, path: str) -> str:
    """The profile file as stages in any working directory find it; "" without one.

    Raises:
        ConfigError: it cannot be read, or the stages are not simulated.
    """
    if path and engine != "sim":
        raise ConfigError("--sim-profile is for simulated stages: add --engine sim", param="--sim-profile")
    read_profile(path)
    return str(Path(path).resolve()) if path else ""
