"""The checks of the doctor that a start makes first: what makes it futile, from files and package metadata alone.

Milliseconds, no tool, no framework. Only findings that say `stops` count, so a start is refused for nothing that the
doctor merely warns of; `--start-checks warn` has them as warnings, for those who know better than the vendor's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.doctor.ascend_files import AscendFiles, read_ascend
from deploy.doctor.check import Finding
from deploy.doctor.device_checks import ASCEND
from deploy.doctor.facts import Facts, MachineFacts, Wanted
from deploy.doctor.gather import kept, read_packages
from deploy.doctor.host_checks import ENVIRONMENT
from deploy.doctor.package_checks import PLUGIN
from epd_serve.errors import ConfigError
from epd_serve.placement import InstancePlan


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
    facts = Facts(Wanted(device, tuple(plans)), MachineFacts((), ""), read_packages(), kept(environment), ascend=ascend)
    found = [one for check in (*ASCEND, PLUGIN, *ENVIRONMENT) for one in check.findings(facts)]
    stops = [one for one in found if one.stops]
    if stops and refuse:
        raise ConfigError(f"{said(stops[0])} (epd-serve doctor shows all; --start-checks warn starts nonetheless)")
    return ascend, tuple(map(said, stops))


def said(finding: Finding) -> str:
    """In one line."""
    return f"{finding.check}: {finding.seen}; {finding.why}. Fix: {finding.fix}"
