"""Gathers the facts. Every tool has a deadline; what concerns another kind of device is not asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from deploy.doctor.ascend_files import AscendFiles, read_ascend
from deploy.doctor.ascend_tools import read_links
from deploy.doctor.environment_checks import KEPT_VALUES, WATCHED
from deploy.doctor.facts import Facts, LinkFacts, RayFacts, Wanted
from deploy.doctor.machine import read_machine
from deploy.doctor.packages import read_master, read_namesakes, read_packages
from deploy.doctor.ray_facts import read_ray
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import read_properties
from npu_ops.vendor_tool import ask

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
