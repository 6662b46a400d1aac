"""A plan beside what came of it: simulated stages under the real launcher take the very times that were predicted."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from deploy.planner.choice import Question, plan
from deploy.planner.goodput import Goal
from deploy.planner.profile import write_device_profile
from deploy.planner.verify import verified
from deploy.planner.workload import workload_of
from epd_serve.image_tokens import ByArea
from epd_serve.sim.profile import Line
from epd_serve.slo import Slo
from tests.deploy.planner.test_plan import PROFILE


def test_what_was_predicted_stands_beside_what_simulated_stages_do(tmp_path: Path) -> None:
    """Requests come by the clock: beside other work TTFT grows, so that the time per token is held to alone."""
    alone = replace(PROFILE, front=Line(), handover=Line(), kv=Line())
    write_device_profile(tmp_path / "profile.json", alone)
    goal = Goal(workload_of("images=0-1@280x280,text=20,output=12", ByArea()), Slo(4000, 400))
    found = plan(Question(goal, alone, 2, layouts=("TP1x2", "EP-D"), seeds=1), processes=1)
    flags = ["--engine", "sim", "--sim-profile", str(tmp_path / "profile.json"), "--arena-mib", "32"]
    first, *others = verified(found, flags, 4.0)
    assert first.startswith(f"  {found.first.layout} at ") and len(others) == (not found.first.monolith)
    (row,) = [line.split() for line in first.splitlines() if "tpot p50" in line]
    assert abs(float(row[-2]) / float(row[-3]) - 1) < 0.35, first
    assert "within 4000:400:p90" in first
