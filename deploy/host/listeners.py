"""Which TCP ports processes listen on (Linux /proc), and which of them answer at other addresses than they should."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.host.processes import group_members

PROBE_S = 0.5
_LISTEN = "0A"
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
    """Listening sockets of the processes; those of a process that has gone are left out."""
    found = []
    for pid in pids:
        inodes = _socket_inodes(pid)
        for table in ("tcp", "tcp6") if inodes else ():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
                rows = [line.split() for line in lines]
                found += [_listener(pid, row[1]) for row in rows if row[3] == _LISTEN and row[9] in inodes]
    return found


async def exposed(pids: Iterable[int], address: str) -> list[Listener]:
    """Listeners that answer at another address of this machine than `address`, by trying.

    A port that is bound to every address may still be narrowed by a filter (`store.port_filter`), which no table shows.
    """
    wide = {one.port: one for one in listeners(pids) if one.everywhere}
    if not wide or ipaddress.ip_address(address).is_unspecified:
        return []
    other = other_address(address)
    answers = await asyncio.gather(*(_answers(other, port) for port in wide))
    return [one for one, answered in zip(wide.values(), answers, strict=True) if answered]


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


async def _answers(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # refused, or a TimeoutError
        return False
    writer.close()
    return True


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed since
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    except OSError:
        return set()  # gone, or not ours
    return inodes


def _listener(pid: int, local: str) -> Listener:
    """`0100007F:5A83`: the address in words of the machine's byte order, the port in hex."""
    address, _, port = local.partition(":")
    words = [bytes.fromhex(address[at : at + 8]) for at in range(0, len(address), 8)]
    packed = b"".join(int.from_bytes(word, "big").to_bytes(4, sys.byteorder) for word in words)
    return Listener(pid, str(ipaddress.ip_address(packed)), int(port, 16))
