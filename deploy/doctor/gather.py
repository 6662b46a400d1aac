"""Gathers the facts. Every tool has a deadline; what concerns another kind of device is not asked.

What is parsed of `npu-smi` and `hccn_tool` is from the vendor's documentation and recorded outputs (npu-smi 23.0 to
25.5); never run on a card by us.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from deploy.doctor.ascend_files import AscendFiles, read_ascend
from deploy.doctor.environment_checks import KEPT_VALUES, WATCHED
from deploy.doctor.facts import Facts, LinkFacts, RayFacts, Wanted
from deploy.doctor.machine import read_machine
from deploy.doctor.packages import read_master, read_namesakes, read_packages
from deploy.doctor.ray_facts import read_ray
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import read_properties
from npu_ops.vendor_tool import ask

_ROW = re.compile(r"^\s*NPU(\d+)\s+(.*)$")
_HCCN_TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"
_FRAMEWORKS = {"npu": ("torch_npu", "vllm"), "cuda": ("torch", "vllm"), "cpu": ("torch", "vllm")}


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
    npu = wanted.device == "npu"
    with ThreadPoolExecutor(thread_name_prefix="doctor") as pool:
        devices = pool.submit(read_properties, inventory)
        packages = pool.submit(read_packages, _FRAMEWORKS[wanted.device] if imports else ())
        namesakes = pool.submit(read_namesakes)
        master = pool.submit(read_master)
        links = pool.submit(read_links, inventory.ids) if npu else None
        cuda = pool.submit(_cuda_driver, wanted.device)
        machine = read_machine()
        ascend = read_ascend(environment) if npu else AscendFiles()
        return Facts(
            wanted=wanted,
            machine=machine,
            packages=packages.result(),
            namesakes=namesakes.result(),
            environment={
                name: value if name in KEPT_VALUES else "set"
                for name, value in environment.items()
                if value and (name in WATCHED or name in KEPT_VALUES)
            },
            devices=devices.result() if inventory.kind == "cpu" or inventory.ids else (),
            devices_note=inventory.note,
            driver_tool=cuda.result()[0],
            compute_modes=cuda.result()[1],
            ascend=ascend,
            links=links.result() if links is not None else LinkFacts(),
            master=master.result(),
            ray=ask_cluster(read_ray(environment)),
        )


def _cuda_driver(device: str) -> tuple[str, tuple[str, ...]]:
    """(version, compute mode of each GPU) by nvidia-smi; nothing where it does not say."""
    if device != "cuda":
        return "", ()
    text, _ = ask("nvidia-smi", "--query-gpu=driver_version,compute_mode", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines()]
    rows = [row for row in rows if len(row) == 2]
    return (rows[0][0] if rows else ""), tuple(row[1] for row in rows)


def read_links(npus: Iterable[int]) -> LinkFacts:
    """Each question has the deadline of `vendor_tool.ask`; a tool that hangs once is not asked again."""
    text, note = ask("npu-smi", "info", "-t", "topo")
    ports: dict[int, str] = {}
    for npu in npus:
        answer, why = _ask_hccn("-i", str(npu), "-link", "-g")
        ports[npu] = link_state(answer) if answer is not None else why
        if answer is None:
            break
    return LinkFacts(parse_topology(text or ""), ports, "" if text else note)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Pairs of the matrix of `npu-smi info -t topo`; its header names the columns."""
    lines = text.splitlines()
    header = next((line for line in lines if len(re.findall(r"\bNPU\d+\b", line)) > 1 and "Affinity" in line), "")
    columns = [int(number) for number in re.findall(r"\bNPU(\d+)\b", header)]
    if not columns:  # one NPU: the header has a single column
        return {}
    found = {}
    for line in lines:
        row = _ROW.match(line)
        if row is None or line == header:
            continue
        cells = row.group(2).split()
        for column, cell in zip(columns, cells, strict=False):
            if cell != "X" and not cell.startswith("NPU"):
                found[int(row.group(1)), column] = cell
    return found


def link_state(text: str) -> str:
    """`link status: UP` as UP."""
    found = re.search(r"link status:\s*(\w+)", text)
    return found.group(1).upper() if found is not None else "unknown"


def _ask_hccn(*arguments: str) -> tuple[str | None, str]:
    answer, why = ask("hccn_tool", *arguments)
    return (answer, why) if "not on PATH" not in why else ask(_HCCN_TOOL, *arguments)
