"""A whole launch with stand-ins for vLLM: `python fake_launch.py RUN_ROOT PORT LAYOUT [fake_stage flags…]`.

Flags of the form `E0=--fail` are for one instance, `+mm_store=mooncake` are options of the launch, `master=…` puts a
stand-in, with these flags, in the place of Mooncake's master, `links_s=…` is the patience with KV links; others are for
all stages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from deploy.agent.second_tier import mooncake_command
from deploy.agent.waits import Patience
from deploy.launch.launcher import Launch
from deploy.options import mooncake
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from epd_serve.engine.argv import stage_command
from epd_serve.errors import EpdError
from epd_serve.stage_plan import StageCommand, StagePlan
from store.mooncake.master import MasterSettings

FAKE_MASTER = str(Path(__file__).with_name("fake_master.py"))
FAKE_STAGE = str(Path(__file__).with_name("fake_stage.py"))


def main() -> int:
    root, port, layout, *flags = sys.argv[1:]

    def command(plan: StagePlan) -> StageCommand:
        env = stage_command(plan).env
        own = [flag.partition("=")[2] for flag in flags if flag.startswith(f"{plan.instance}=")]
        shared = [flag for flag in flags if flag.startswith("--")]
        wiring = ("--wiring", json.dumps(plan.wiring.to_json())) if plan.wiring.kv_publish else ()
        return StageCommand((sys.executable, FAKE_STAGE, plan.uds or str(plan.port), *wiring, *shared, *own), env)

    def master(settings: MasterSettings) -> tuple[str, ...]:
        own = [flag.partition("=")[2] for flag in flags if flag.startswith("master=--")]
        return (sys.executable, FAKE_MASTER, settings.host, str(settings.rpc_port), str(settings.metrics_port), *own)

    options: dict[str, Any] = dict(flag[1:].split("=", 1) for flag in flags if flag.startswith("+"))
    options |= {name: int(options[name]) for name in ("workers",) if name in options}
    flags = [flag for flag in flags if not flag.startswith("+")]
    config = DeployConfig(
        layout=layout, device="cpu", port=int(port), run_root=root, arena_mib=8, kv_staging_mib=4, **options
    )
    master_of = mooncake_command
    if any(flag.startswith("master=") for flag in flags):
        master_of = master
        mooncake.what_is_missing = lambda device, master: ""  # type: ignore[assignment]
    links_s = next((float(flag.partition("=")[2]) for flag in flags if flag.startswith("links_s=")), 120.0)
    patience = Patience(poll_s=0.05, backoff_s=0.1, health_every_s=0.1, stop_grace_s=1.0, links_s=links_s)
    try:
        return Launch(draw(config), command, master_of, patience).run()
    except EpdError as error:
        print(f"epd-serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
