"""`epd-serve doctor`: what would keep this machine from serving, and what to do about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from deploy.doctor.check import Check, Finding, Level
from deploy.doctor.device_checks import ASCEND, DEVICES, LINKS
from deploy.doctor.facts import Facts, RayFacts, Wanted
from deploy.doctor.gather import gather
from deploy.doctor.host_checks import ENVIRONMENT, MACHINE
from deploy.doctor.package_checks import MOONCAKE, PYTHON
from deploy.doctor.ray_checks import SEVERAL_HOSTS
from deploy.doctor.report import counts, document, text
from deploy.host.environment import environment, is_terminal
from deploy.memory.shared_memory import SharedMemory, wanted_mib
from deploy.options.config import DeployConfig
from epd_serve.errors import ConfigError, EpdError
from epd_serve.layout_parser import parse
from epd_serve.model_facts import check_model_fits, read_model_facts
from epd_serve.placement import check_servable, lower
from npu_ops.discovery import DeviceInventory, DiscoveryError, discover

CHECKS: dict[str, tuple[Check, ...]] = {
    "Ascend": ASCEND,
    "Devices": DEVICES,
    "Links": LINKS,
    "Python": PYTHON,
    "Mooncake": MOONCAKE,
    "Several hosts": SEVERAL_HOSTS,
    "Machine": MACHINE,
    "Environment": ENVIRONMENT,
}
"""By heading."""


def examine(facts: Facts) -> dict[str, list[Finding]]:
    """Findings by heading; headings without any are left out."""
    found = {heading: [one for check in checks for one in check.findings(facts)] for heading, checks in CHECKS.items()}
    return {heading: findings for heading, findings in found.items() if findings}


def run_doctor(
    *,
    device: str,
    layout: str,
    model: str,
    as_json: bool,
    imports: bool,
    ask_cluster: Callable[[RayFacts], RayFacts] = lambda ray: ray,
) -> int:
    """Print the report. `ask_cluster`: as of `gather`.

    Returns:
        0, or 1 when there is an error among the findings.
    """
    note = ""
    try:
        inventory = discover(device)
    except DiscoveryError as error:
        note = str(error)
        inventory = DeviceInventory("cpu" if device == "auto" else device, note=note)  # type: ignore[arg-type]
    wanted = _wanted(inventory, layout, model, note)
    facts = gather(wanted, inventory, environment(), imports=imports, ask_cluster=ask_cluster)
    findings = examine(facts)
    if as_json:
        print(json.dumps(document(facts, findings), indent=2, ensure_ascii=False))
    else:
        print(text(facts, findings, colour=is_terminal() and sys.stdout.isatty()))
    return 1 if counts(findings)[Level.ERROR] else 0


def _wanted(inventory: DeviceInventory, layout: str, model: str, note: str) -> Wanted:
    """What is to be served, as far as it can be: what is wrong with it becomes a finding."""
    if note:
        return Wanted(inventory.kind, layout=layout, refusal=note)
    if not layout and not model:
        return Wanted(inventory.kind)
    try:
        parsed = parse(layout or "(E-P)-D")
        check_servable(parsed)
        if model:
            check_model_fits(read_model_facts(model), parsed)
        plans = lower(parsed, inventory.allot(parsed.device_count))
    except (ConfigError, EpdError) as error:
        return Wanted(inventory.kind, layout=layout, refusal=str(error))
    travel = any(role.sends_features for role in parsed.roles)
    shm = wanted_mib(SharedMemory(DeployConfig.arena_mib, DeployConfig.kv_staging_mib), plans, features_travel=travel)
    return Wanted(inventory.kind, plans, str(parsed), shm_mib=shm)
