"""A joined stage with a stand-in for vLLM: `python fake_join.py RUN_ROOT HEAD_URL KEY_FILE ROLE HOST PORT [flags…]`.

Flags are `fake_stage.py`'s, but for `--instance=NAME` and `--passed=WORD`, which are the operator's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deploy.agent.waits import Patience
from deploy.cluster.join import serve_joined
from deploy.cluster.join_plan import JoinPlan
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from epd_serve.engine.argv import stage_command
from epd_serve.errors import EpdError
from epd_serve.key_files import read_cluster_key
from epd_serve.roles import Role
from epd_serve.stage_plan import StageCommand, StagePlan

FAKE_STAGE = str(Path(__file__).with_name("fake_stage.py"))


def main() -> int:
    root, head, key_file, role, host, port, *flags = sys.argv[1:]
    names = [flag.partition("=")[2] for flag in flags if flag.startswith("--instance=")]
    passed = [flag.partition("=")[2] for flag in flags if flag.startswith("--passed=")]
    flags = [flag for flag in flags if not flag.startswith(("--instance=", "--passed="))]

    def command(plan: StagePlan) -> StageCommand:
        real = stage_command(plan)
        Path(root, f"{plan.instance}-{plan.wiring.incarnation}.json").write_text(str(plan.wiring.to_json()))
        wiring = ("--wiring", json.dumps(plan.wiring.to_json())) if plan.wiring.kv_publish else ()
        argv = (sys.executable, FAKE_STAGE, str(plan.port), "--host", plan.host, *wiring, *flags)
        return StageCommand(argv, real.env)

    plan = JoinPlan(
        draw(DeployConfig(layout="TP1", device="cpu")),
        Role(role),
        host,
        int(port),
        "".join(names),
        arena_mib=8,
        segment_mib=8,
        passed=tuple(passed),
    )
    patience = Patience(poll_s=0.05, backoff_s=0.1, health_every_s=0.1, stop_grace_s=1.0)
    try:
        return serve_joined(
            plan, head, read_cluster_key(key_file), drain_s=5, root=Path(root), command_of=command, patience=patience
        )
    except EpdError as error:
        print(f"epd-serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
