"""Which tiers the MM Store of a launch has, and whether what they need is installed. Decided before anything starts."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from deploy.options.config import DeployConfig
from deploy.options.mooncake_package import (
    client_warnings,
    install_command,
    libibverbs_loads,
    too_old_for_a_master,
)
from epd_serve.errors import ConfigError

MASTER_PROGRAM = "mooncake_master"

_ON_NPUS = (
    "Mooncake Store does not come up beside NPUs: its Ascend transport wants a device set in every thread, and the "
    "schedulers, which look for features, have none; nor does each release take host memory that CANN did not allocate"
)
"""Read in Mooncake's `ascend_direct_transport.cpp` (`aclrtGetDevice` at a registration) and its #1406 and #4046."""


def choose_pool(
    config: DeployConfig, device: str, *, features_travel: bool, several: bool = False
) -> tuple[bool, tuple[str, ...]]:
    """Does the launch use Mooncake as second tier? And the warnings to show.

    `auto` means the arena alone on one host, and Mooncake beside it on several nodes or where a master is given; where
    Mooncake cannot do it `auto` stays with each node's arena and says so. On NPUs it cannot (`_ON_NPUS`).

    Args:
        several: features may have to go from one node to another.

    Raises:
        ConfigError: Mooncake is asked for and cannot do it here, is not installed, or is too old for a master of ours.
    """
    asked = config.mm_store == "mooncake" or bool(config.mooncake_master)
    if not features_travel:
        return False, (("the layout has no encode-only instance: no features travel, Mooncake is not used",) * asked)
    if not asked and (config.mm_store == "arena" or not several):
        return False, ()
    missing = _ON_NPUS if device == "npu" else what_is_missing(device, master=not config.mooncake_master)
    if not missing:
        return True, client_warnings(pooled=True, kv_over_tcp=False)
    if asked:
        flag = "--mm-store mooncake" if config.mm_store == "mooncake" else "--mooncake-master"
        advice = "; use --mm-store arena, which all stages of a host share" if device == "npu" else ""
        raise ConfigError(f"{flag}: {missing}{advice}", param="--mm-store")
    return False, (f"features go through a node alone, and are computed again on others: {missing}",)


def what_is_missing(device: str, *, master: bool) -> str:
    """What Mooncake lacks here, and the command that brings it; "" when it is complete. Imports nothing of it."""
    if importlib.util.find_spec("mooncake") is None:
        return f"Mooncake is not installed; {install_command(device)}"
    if not libibverbs_loads():
        return "Mooncake needs libibverbs; apt-get install libibverbs1"
    if master and master_program() is None:
        return (
            f"the program {MASTER_PROGRAM} is not on PATH; {install_command(device)}, or run it elsewhere and "
            "give --mooncake-master HOST:PORT"
        )
    return too_old_for_a_master(device) if master else ""


def master_program() -> Path | None:
    """The master's executable: of this Python's environment first, then of PATH."""
    beside = Path(sys.executable).with_name(MASTER_PROGRAM)
    if beside.exists():
        return beside
    found = shutil.which(MASTER_PROGRAM)
    return Path(found) if found else None
