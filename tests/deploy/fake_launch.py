"""A whole launch with stand-ins for vLLM: `python fake_launch.py RUN_ROOT PORT LAYOUT [fake_stage flags…]`.

Flags of the form `E0=--fail` are for one instance, others for all.
"""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.blueprint import draw
from deploy.config import DeployConfig
from deploy.launcher import Launch
from deploy.supervisor import Patience
from epd_serve.engine.argv import StageCommand, StagePlan, stage_command
from epd_serve.errors import EpdError

FAKE_STAGE = str(Path(__file__).with_name("fake_stage.py"))


def main() -> int:
    root, port, layout, *flags = sys.argv[1:]

    def command(plan: StagePlan) -> StageCommand:
        env = stage_command(plan).env
        own = [flag.partition("=")[2] for flag in flags if flag.startswith(f"{plan.instance}=")]
        shared = [flag for flag in flags if not flag[0].isupper()]
        return StageCommand((sys.executable, FAKE_STAGE, str(plan.port), *shared, *own), env)

    config = DeployConfig(layout=layout, device="cpu", port=int(port), run_root=root, arena_mib=8, kv_staging_mib=4)
    patience = Patience(poll_s=0.05, backoff_s=0.1, health_every_s=0.1, stop_grace_s=1.0)
    try:
        return Launch(draw(config), command, patience).run()
    except EpdError as error:
        print(f"epd-serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
