"""Which TCP ports processes listen on, and which of them answer at other addresses than they should."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from deploy.host.processes import group_members

PROBE_S = 0.5
_ELSEWHERE = ("192.0.2.1", 9)  # RFC 5737: an address of nobody


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket. `address` is numeric; 0.0.0.0 or :: means every address of the machine."""

    pid: int
    address: str
    port: int

    @property
    def everywhere(self) -> bool:
        return ipaddress.ip_address(self.address).is_unspecified


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Listening sockets of the processes; those of a process that has gone, or is not ours, are left out."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            bound = psutil.Process(pid).net_connections("tcp")
            found += [Listener(pid, *one.laddr) for one in bound if one.status == psutil.CONN_LISTEN]
    return found


async def exposed(pids: Iterable[int], address: str) -> list[Listener]:
    """Listeners that answer at another address of this machine than `address`, by trying.

    A port that is bound to every address may still be narrowed by a filter (`store.port_filter`), which no table shows.
    """
    wide = {one.port: one for one in listeners(pids) if one.everywhere}
    if not wide or ipaddress.ip_address(address).is_unspecified:
        return []
    other = other_address(address)
    answered = await asyncio.gather(*(answers(other, port, PROBE_S) for port in wide))
    return [one for one, does in zip(wide.values(), answered, strict=True) if does]


async def exposure_warnings(groups: Mapping[str, int], address: str) -> list[str]:
    """One line per port of the process groups (leader by name) that answers beyond `address`."""
    lines = []
    for name, leader in groups.items():
        members = await asyncio.to_thread(group_members, leader)
        for one in await exposed([member.pid for member in members], address):
            lines.append(
                f"warning: port {one.port} of {name} answers at every address of this machine and asks nobody who they "
                f"are; firewall it (it is meant for {address})"
            )
    return lines


def other_address(address: str) -> str:
    """An IPv4 address of this machine that is not `address`: one that others can reach, where there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(_ELSEWHERE)  # sends nothing: it makes the kernel choose the address it would send from
        outside = str(probe.getsockname()[0])
        if outside != address:
            return outside
    return "127.0.0.1" if address == "127.0.0.2" else "127.0.0.2"


async def answers(host: str, port: int, within_s: float) -> bool:
    """Whether a connection to it comes through."""
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, UnicodeError):  # refused, unknown, too long for a name, or a TimeoutError
        return False
    writer.close()
    return True
