"""All checks, in the order in which they are read. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from deploy.doctor.ascend_checks import ascend_checks
from deploy.doctor.device_checks import device_checks
from deploy.doctor.environment_checks import environment_checks
from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding
from deploy.doctor.link_checks import link_checks
from deploy.doctor.machine_checks import machine_checks
from deploy.doctor.mooncake_checks import mooncake_checks
from deploy.doctor.package_checks import package_checks
from deploy.doctor.ray_checks import ray_checks

CHECKS: dict[str, Callable[[Facts], Iterator[Finding]]] = {
    "Ascend": ascend_checks,
    "Devices": device_checks,
    "Links": link_checks,
    "Python": package_checks,
    "Mooncake": mooncake_checks,
    "Several hosts": ray_checks,
    "Machine": machine_checks,
    "Environment": environment_checks,
}
"""By heading."""


def examine(facts: Facts) -> dict[str, list[Finding]]:
    """Findings by heading; headings without any are left out."""
    found = {heading: list(check(facts)) for heading, check in CHECKS.items()}
    return {heading: findings for heading, findings in found.items() if findings}
