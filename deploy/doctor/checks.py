"""All checks, in the order in which they are read. Pure: facts in, findings out."""

from __future__ import annotations

from deploy.doctor.check import Check, Finding
from deploy.doctor.device_checks import ASCEND, DEVICES, LINKS
from deploy.doctor.facts import Facts
from deploy.doctor.host_checks import ENVIRONMENT, MACHINE
from deploy.doctor.package_checks import MOONCAKE, PYTHON
from deploy.doctor.ray_checks import SEVERAL_HOSTS

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
