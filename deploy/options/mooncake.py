"""Which Mooncake is installed, by package metadata, and what follows: which tiers the MM Store of a launch has, what
its version cannot do for us. Decided before anything starts; imports none of it.

The second tier wants `SECOND_TIER_FROM`: before, `mooncake_master` has no `--metrics_host` and ends at once (unbound,
its ports would answer anybody), and clients take no notice of our limits for calls. The Transfer Engine is another
matter: KV over `ascend` needs nothing newer than the 0.3.11.post1 that vllm-ascend 0.23's image brings.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.options.config import DeployConfig
from deploy.options.versions import installed, numbers
from epd_serve.errors import ConfigError
from epd_serve.placement import InstancePlan
from epd_serve.wiring import STORE

MASTER_PROGRAM = "mooncake_master"
PACKAGES = {
    "cpu": "mooncake-transfer-engine-non-cuda",
    "cuda": "mooncake-transfer-engine-cuda13",
    "npu": "mooncake-transfer-engine-npu",
}
"""One build per kind of device; all import as `mooncake`."""

CUDA_12 = "mooncake-transfer-engine"
"""Wants libcudart.so.12; vLLM's wheels, and torch with them, are of CUDA 13."""

SECOND_TIER_FROM = "0.3.13.post1"
"""The first with `mooncake_master --metrics_host` and all variables that bound a call (`tests/contract/known.py`)."""

_ON_NPUS = "Mooncake Store over Ascend has not run on a card yet"
"""Its transport's rules are kept (`store/mooncake/client.py`), as they are read in `ascend_direct_transport.cpp`."""


def choose_pool(
    config: DeployConfig, device: str, *, features_travel: bool, several: bool = False
) -> tuple[bool, tuple[str, ...]]:
    """Does the launch use Mooncake as second tier? And the warnings to show.

    `auto` means the arena alone on one host, and Mooncake beside it on several nodes or where a master is given; where
    Mooncake cannot do it `auto` stays with each node's arena and says so; so it does on NPUs (`_ON_NPUS`).

    Args:
        several: features may have to go from one node to another.

    Raises:
        ConfigError: Mooncake is asked for and is not installed, or is too old for a master of ours.
    """
    asked = config.mm_store == "mooncake" or bool(config.mooncake_master)
    if not features_travel:
        return False, (("the layout has no encode-only instance: no features travel, Mooncake is not used",) * asked)
    if not asked and (config.mm_store == "arena" or not several):
        return False, ()
    missing, untried = what_is_missing(device, master=not config.mooncake_master), (_ON_NPUS,) * (device == "npu")
    if asked and missing:
        flag = "--mm-store mooncake" if config.mm_store == "mooncake" else "--mooncake-master"
        raise ConfigError(f"{flag}: {missing}", param="--mm-store")
    if asked or not (missing or untried):
        return True, untried + client_warnings(pooled=True, kv_over_tcp=False)
    why = missing or f"{_ON_NPUS}; --mm-store mooncake tries it"
    return False, (f"features go through a node alone, and are computed again on others: {why}",)


def check_feature_transfer(config: DeployConfig, device: str, plans: Sequence[InstancePlan]) -> tuple[str, ...]:
    """May encoders write features to the devices of who prefills, where that is asked for? And the warnings to show.

    Raises:
        ConfigError: it cannot work here; says why, and what does.
    """
    if config.feature_transfer == STORE:
        return ()
    takers = [plan for plan in plans if plan.role.takes_features and (plan.role.prefills or plan.both)]
    pairs = [(one, other) for one in plans if one.role.sends_features for other in takers]
    apart = [1 for one, other in pairs if device != "npu" or not set(one.devices) & set(other.devices)]
    why = ""
    if config.engine == "sim":
        why = "simulated stages keep features in the arena"
    elif not pairs:
        why = "the layout has no encode-only instance beside one that prefills: no features travel"
    elif config.feature_slab == "off":
        why = "encoders write to the slab; leave --feature-slab off away"
    elif missing := reads_device_memory(device) or what_is_missing(device, master=False):
        why = missing
    elif not apart:
        why = "every encoder shares an NPU with who prefills, and Mooncake cannot connect one with itself; use E-P-D"
    if why:
        raise ConfigError(f"--feature-transfer device: {why}; or leave the flag away", param="feature_transfer")
    return ("features from card to card have not run on a card yet (--feature-transfer device)",) * (device != "cpu")


def what_is_missing(device: str, *, master: bool) -> str:
    """What Mooncake lacks here, and the command that brings it; "" when it is complete. `master`: of ours."""
    if importlib.util.find_spec("mooncake") is None:
        return f"Mooncake is not installed; {install_command(device)}"
    if not libibverbs_loads():
        return "Mooncake needs libibverbs; apt-get install libibverbs1"
    if master and master_program() is None:
        return (
            f"the program {MASTER_PROGRAM} is not on PATH; {install_command(device)}, or run it elsewhere and "
            "give --mooncake-master HOST:PORT"
        )
    if master and (older := _older_build()):
        return (
            f"{older} has no mooncake_master whose ports can be bound (--metrics_host); "
            f"{install_command(device)}, or run a newer one elsewhere and give --mooncake-master HOST:PORT"
        )
    return ""


def client_warnings(*, pooled: bool, kv_over_tcp: bool) -> tuple[str, ...]:
    """What an older Mooncake does worse where it is used nonetheless, one line each."""
    older = _older_build()
    limits = (
        f"{older} keeps limits of its own for calls to the master: features may be held up to 30 s longer by one that "
        f"hangs ({SECOND_TIER_FROM} has ours)"
    )
    writes = f"{older} over tcp: one write of 200 MB of KV may fail ({SECOND_TIER_FROM} does it)"
    return tuple(line for line, applies in ((limits, pooled), (writes, kv_over_tcp)) if older and applies)


def reads_device_memory(device: str) -> str:
    """Why Mooncake cannot move KV or features between devices of this kind, or "": a build without CUDA takes a GPU's
    addresses for the host's, and ends the process at the first byte (its own wheels say which they are; a built one is
    trusted)."""
    builds = installed_builds()
    if not builds:
        return f"Mooncake is not installed: {install_command(device)}"
    first = next(iter(builds))
    if device == "cuda" and first == CUDA_12:
        return f"{CUDA_12} is of CUDA 12, and vLLM's wheels are of CUDA 13: {install_command(device)}"
    if device == "cuda" and builds.keys().isdisjoint((PACKAGES["cuda"], "mooncake")):
        return f"{first} reads host memory only, and KV is in the GPU's: {install_command(device)}"
    return ""


def installed_builds() -> dict[str, str]:
    """Version by name of all builds of Mooncake in this environment; more than one overwrite each other's files.

    One that was built from source and left no metadata is `mooncake`, without a version.
    """
    found = installed((*PACKAGES.values(), CUDA_12))
    built = not found and importlib.util.find_spec("mooncake") is not None
    return {"mooncake": ""} if built else found


def is_older(version: str) -> bool:
    """Whether it is known to be older than the second tier wants."""
    return bool(version) and numbers(version) < numbers(SECOND_TIER_FROM)


def _older_build() -> str:
    """Name and version of one that is, or ""."""
    return next((f"{name} {version}" for name, version in installed_builds().items() if is_older(version)), "")


def install_command(device: str) -> str:
    return f"pip install {PACKAGES[device]}=={SECOND_TIER_FROM}"


def libibverbs_loads() -> bool:
    """Whether the library that every build of Mooncake needs is there."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True


def master_program() -> str | None:
    """The master's executable: of this Python's environment first, then of PATH."""
    beside = Path(sys.executable).with_name(MASTER_PROGRAM)
    return str(beside) if beside.exists() else shutil.which(MASTER_PROGRAM)
