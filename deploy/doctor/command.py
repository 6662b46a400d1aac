"""`epd-serve doctor`: what would keep this machine from serving, and what to do about it.

All checks in the order in which they are read, and the report of what they find: text for people, JSON for bug reports.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.doctor.check import Check, Finding, Level
from deploy.doctor.device_checks import ASCEND, DEVICES, LINKS
from deploy.doctor.facts import Facts, RayFacts, Wanted
from deploy.doctor.gather import gather
from deploy.doctor.host_checks import ENVIRONMENT, MACHINE
from deploy.doctor.package_checks import MOONCAKE, PYTHON
from deploy.doctor.ray_checks import SEVERAL_HOSTS
from deploy.host.environment import environment, is_terminal
from deploy.memory.shared_memory import LEAST_ARENA_MIB, SharedMemory, wanted_mib
from deploy.options.config import DeployConfig
from deploy.options.versions import installed_vllm, spelled
from epd_serve import __version__
from epd_serve.errors import ConfigError, EpdError
from epd_serve.layout_parser import parse
from epd_serve.model_facts import check_model_fits, read_model_facts
from epd_serve.model_support import check_encoder_free
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
    encoder_free: bool = False,
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
    wanted = _wanted(inventory, layout, model, note, encoder_free=encoder_free)
    facts = gather(wanted, inventory, environment(), imports=imports, ask_cluster=ask_cluster)
    findings = examine(facts)
    if as_json:
        print(json.dumps(document(facts, findings), indent=2, ensure_ascii=False))
    else:
        print(text(facts, findings, colour=is_terminal() and sys.stdout.isatty()))
    return 1 if counts(findings)[Level.ERROR] else 0


def _wanted(inventory: DeviceInventory, layout: str, model: str, note: str, *, encoder_free: bool = False) -> Wanted:
    """What is to be served, as far as it can be: what is wrong with it becomes a finding."""
    if note:
        return Wanted(inventory.kind, layout=layout, refusal=note)
    if not (layout or model or encoder_free):
        return Wanted(inventory.kind)
    try:
        parsed = parse(layout or "(E-P)-D")
        check_servable(parsed)
        facts = read_model_facts(model) if model else None
        check_model_fits(facts, parsed)
        if encoder_free:
            check_encoder_free(facts.architecture if facts is not None else "", parsed, installed_vllm())
        plans = lower(parsed, inventory.allot(parsed.device_count))
    except (ConfigError, EpdError) as error:
        return Wanted(inventory.kind, layout=layout, refusal=str(error))
    travel = any(role.sends_features for role in parsed.roles)
    shm = wanted_mib(SharedMemory(LEAST_ARENA_MIB, DeployConfig.kv_staging_mib), plans, features_travel=travel)
    return Wanted(inventory.kind, plans, str(parsed), shm_mib=shm)


_MARKS = {Level.OK: ("✓", "32"), Level.WARNING: ("!", "33"), Level.ERROR: ("✗", "31")}
"""What stands before a finding, and its colour (ANSI)."""

_WIDTH = 110

Findings = Mapping[str, Sequence[Finding]]


def text(facts: Facts, findings: Findings, *, colour: bool = False) -> str:
    """The whole report. A line that is well is one line; another has its reason and its fix below."""
    indent = max(len(one.check) for group in findings.values() for one in group) + 6
    lines = [f"epd-serve {__version__} on {facts.wanted.device}"]
    for heading, group in findings.items():
        lines += ["", _painted(heading, "1", colour)]
        for one in group:
            mark = _painted(*_MARKS[one.level], colour)
            first, *more = _wrapped(one.seen, " " * indent)
            lines += [f"  {mark} {one.check:<{indent - 4}}{first.strip()}", *more]
            if one.fix:
                lines += _wrapped(one.why, " " * indent + "why: ") + _wrapped(one.fix, " " * indent + "fix: ")
    return "\n".join((*lines, "", summary(findings)))


def counts(findings: Findings) -> Counter[Level]:
    """How many findings there are of each level."""
    return Counter(one.level for group in findings.values() for one in group)


def summary(findings: Findings) -> str:
    found = counts(findings)
    errors, warnings = (
        f"{found[level] or 'no'} {level.value}{'' if found[level] == 1 else 's'}"
        for level in (Level.ERROR, Level.WARNING)
    )
    return f"{errors} and {warnings}, {found[Level.OK]} checks passed"


def document(facts: Facts, findings: Findings) -> dict[str, Any]:
    """For `--json`: versions and findings, nothing of the environment but what a finding says."""
    packages = {**facts.packages.versions, **facts.packages.mooncake}
    ascend = {"cann": facts.ascend.cann, "driver": facts.ascend.driver}
    return {
        "epd_serve": __version__,
        "device": facts.wanted.device,
        "layout": facts.wanted.layout,
        "python": spelled(facts.machine.python),
        "architecture": facts.machine.architecture,
        "versions": packages | {name: one for name, one in ascend.items() if one},
        "devices": [one.name for one in facts.devices],
        "findings": [
            {"heading": heading, **asdict(one), "seen": tidy(one.seen), "fix": tidy(one.fix)}
            for heading, group in findings.items()
            for one in group
        ],
        "errors": counts(findings)[Level.ERROR],
    }


def tidy(words: str) -> str:
    """Without the name of the user, which is in the path of a home directory."""
    home = str(Path.home())
    return words.replace(home, "~") if len(home) > 1 else words


def _wrapped(words: str, first: str) -> list[str]:
    """Commands are not broken at their hyphens."""
    return textwrap.wrap(
        tidy(words) or "-",
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _painted(words: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{words}\x1b[0m" if colour else words
