"""What a server holds: tokens of KV cache by instance, its processes' memory on this host, its devices' memory.

Owns how each is asked. Tokens of KV cache are what a layout's memory plan comes to, on any device: they are the figure
to compare. Host memory is known of servers on this machine alone; it counts shared pages once. Device memory is that of
all that uses the device, as the vendor's tool tells it.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import psutil

from bench.clients.target import LOOK_S, Target
from epd_serve.errors import StageError
from npu_ops import npu_smi, vendor_tool

_INFO = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_OURS = ("deploy", "epd-serve", "vllm")
MIB = 1 << 20


def kv_tokens(target: Target) -> dict[str, int]:
    """By instance, how many tokens its KV cache holds: of our proxy by its status table, else by vLLM's metrics.

    Empty where the server tells neither.
    """
    try:
        table = target.ask("/instances", limit_s=LOOK_S).json()["instances"]
        return {f"{one['id']} ({one['role']})": int((one["stage"] or {}).get("kv_tokens", 0)) for one in table}
    except StageError:
        pass  # no proxy of ours
    try:
        return parse_cache_info(target.ask("/metrics", limit_s=LOOK_S).text)
    except StageError:
        return {}


def parse_cache_info(metrics: str) -> dict[str, int]:
    """Of vLLM's metrics: by engine, blocks times tokens of a block."""
    found = {}
    for labels in (dict(_LABEL.findall(info)) for info in _INFO.findall(metrics)):
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if blocks.isdecimal() and size.isdecimal():
            found[f"engine {labels.get('engine', '0')}"] = int(blocks) * int(size)
    return found


def host_mib(target: Target) -> int | None:
    """Proportional set size of the server's processes; None where it is on another host, or not ours to see."""
    if not target.endpoint.local:
        return None
    listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.pid]
    roots = {_root(psutil.Process(one.pid)) for one in listening if one.laddr.port == target.endpoint.port}
    total_bytes = 0
    for process in {each for root in roots for each in (root, *root.children(recursive=True))}:
        with contextlib.suppress(psutil.Error):  # it has ended
            total_bytes += process.memory_full_info().pss
    return round(total_bytes / MIB) if roots else None


def device_used() -> dict[str, int]:
    """MiB in use of each device, by all processes; empty without a vendor's tool."""
    table, _ = vendor_tool.ask("nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
    if table:
        rows = [line.split(",") for line in table.splitlines() if line.count(",") == 1]
        return {f"cuda {index.strip()}": int(used) for index, used in rows if used.strip().isdecimal()}
    table, _ = vendor_tool.ask("npu-smi", "info")
    if not table:
        return {}
    return {f"npu {card}.{chip}": usage.used_bytes // MIB for (card, chip), usage in npu_smi.parse_usage(table).items()}


def of(target: Target) -> dict[str, Any]:
    """All of it, as it goes into the report."""
    return {"kv_tokens": kv_tokens(target), "host_mib": host_mib(target), "device_mib": device_used()}


def _root(process: psutil.Process) -> psutil.Process:
    """The topmost ancestor that belongs to the server: our root of a front door, plain vLLM's own."""
    while (parent := process.parent()) is not None and _ours(parent):
        process = parent
    return process


def _ours(process: psutil.Process) -> bool:
    """A shell that started it has its name among the words of a script, so it has to be Python."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()[:4]
        return bool(words) and "python" in words[0] and any(name in word for word in words for name in _OURS)
    return False
