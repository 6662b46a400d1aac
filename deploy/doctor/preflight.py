"""The checks of the doctor that a start makes first: what makes it futile, from files and package metadata alone.

Milliseconds, no tool, no framework. Only findings that say `stops` count, so a start is refused for nothing that the
doctor merely warns of; `--start-checks warn` has them as warnings, for those who know better than the vendor's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.doctor.ascend_checks import ascend_checks
from deploy.doctor.ascend_files import AscendFiles, read_ascend
from deploy.doctor.environment_checks import KEPT_VALUES, environment_checks
from deploy.doctor.facts import Facts, MachineFacts, Wanted
from deploy.doctor.finding import Finding
from deploy.doctor.package_checks import plugin_check
from deploy.doctor.packages import read_packages
from epd_serve.errors import ConfigError
from epd_serve.placement import InstancePlan

_NOTHING = MachineFacts((), "")


def preflight(
    device: str, plans: Sequence[InstancePlan], environment: Mapping[str, str], *, refuse: bool, root: Path = Path("/")
) -> tuple[AscendFiles, tuple[str, ...]]:
    """Look at what stages on this kind of device cannot do without.

    Args:
        refuse: raise what is wrong; else it is among the warnings.

    Returns:
        What was read of Ascend's files, and warnings to show.

    Raises:
        ConfigError: the first thing that makes a start futile, with its fix.
    """
    if device == "cpu":
        return AscendFiles(), ()
    ascend = read_ascend(environment, root) if device == "npu" else AscendFiles()
    kept = {name: environment[name] for name in KEPT_VALUES if environment.get(name)}
    facts = Facts(Wanted(device, tuple(plans)), _NOTHING, read_packages(), kept, ascend=ascend)
    stops = [one for one in (*ascend_checks(facts), plugin_check(facts), *environment_checks(facts)) if one.stops]
    if stops and refuse:
        raise ConfigError(f"{said(stops[0])} (epd-serve doctor shows all; --start-checks warn starts nonetheless)")
    return ascend, tuple(map(said, stops))


def said(finding: Finding) -> str:
    """In one line."""
    return f"{finding.check}: {finding.seen}; {finding.why}. Fix: {finding.fix}"
