"""Which Mooncake is installed, read from package metadata, and what its version cannot do for us. Imports none of it.

The second tier wants `SECOND_TIER_FROM`: before, `mooncake_master` has no `--metrics_host` and ends at once (unbound,
its ports would answer anybody), and clients take no notice of our limits for calls. The Transfer Engine is another
matter: KV over `ascend` needs nothing newer than the 0.3.11.post1 that vllm-ascend 0.23's image brings.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass

from deploy.options.versions import installed, numbers

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


@dataclass(frozen=True)
class MooncakePackage:
    """`version`: "" where it was built from source and left no metadata."""

    name: str
    version: str


def installed_packages() -> tuple[MooncakePackage, ...]:
    """All builds of Mooncake in this environment; more than one overwrite each other's files."""
    found = tuple(MooncakePackage(*one) for one in installed((*PACKAGES.values(), CUDA_12)).items())
    built = not found and importlib.util.find_spec("mooncake") is not None
    return (MooncakePackage("mooncake", ""),) if built else found


def libibverbs_loads() -> bool:
    """Whether the library that every build of Mooncake needs is there."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True


def is_older(package: MooncakePackage) -> bool:
    """Whether it is known to be older than the second tier wants."""
    return bool(package.version) and numbers(package.version) < numbers(SECOND_TIER_FROM)


def install_command(device: str) -> str:
    return f"pip install {PACKAGES[device]}=={SECOND_TIER_FROM}"


def reads_device_memory(device: str) -> str:
    """Why Mooncake cannot move KV between devices of this kind, or "": a build without CUDA takes a GPU's addresses for
    the host's, and ends the process at the first byte (its own wheels say which they are; a built one is trusted)."""
    found = installed_packages()
    if not found:
        return f"Mooncake is not installed: {install_command(device)}"
    if device == "cuda" and found[0].name == CUDA_12:
        return f"{CUDA_12} is of CUDA 12, and vLLM's wheels are of CUDA 13: {install_command(device)}"
    if device == "cuda" and not {one.name for one in found} & {PACKAGES["cuda"], "mooncake"}:
        return f"{found[0].name} reads host memory only, and KV is in the GPU's: {install_command(device)}"
    return ""


def too_old_for_a_master(device: str) -> str:
    """Why the installed Mooncake cannot run our master, with the command that helps; "" where it can, or may."""
    for package in installed_packages():
        if is_older(package):
            return (
                f"{package.name} {package.version} has no mooncake_master whose ports can be bound (--metrics_host); "
                f"{install_command(device)}, or run a newer one elsewhere and give --mooncake-master HOST:PORT"
            )
    return ""


def client_warnings(*, pooled: bool, kv_over_tcp: bool) -> tuple[str, ...]:
    """What an older Mooncake does worse where it is used nonetheless, one line each."""
    lines = []
    for package in installed_packages():
        if not is_older(package):
            continue
        named = f"{package.name} {package.version}"
        if pooled:
            lines.append(
                f"{named} keeps limits of its own for calls to the master: features may be held up to 30 s longer by "
                f"one that hangs ({SECOND_TIER_FROM} has ours)"
            )
        if kv_over_tcp:
            lines.append(f"{named} over tcp: one write of 200 MB of KV may fail ({SECOND_TIER_FROM} does it)")
    return tuple(lines)
