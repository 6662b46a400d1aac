"""Ports: free ones for stages, held until they listen, and the public one, taken before anything slow starts.

`proxy.server.uvicorn_server` can bind too; it is not imported here because its web framework takes longer to load than
all of the launcher, and the stages should be loading theirs meanwhile.

Also which ports processes listen on, and which of them answer at other addresses than they should.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import itertools
import random
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy.host.processes import group_members
from epd_serve.errors import ConfigError

LOWEST = 20000
BACKLOG = 2048
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def free_ports(count: int, host: str = "127.0.0.1", within: range = range(0)) -> list[int]:
    """Distinct free ports.

    Args:
        host: numeric address. within: to choose from; by default those below the range from which the kernel takes
            ports of outgoing connections, which must not get what a stage binds only half a minute later.

    Raises:
        ConfigError: not enough free ports.
    """
    free = (port for port in _shuffled(within or _not_ephemeral()) if is_free(host, port))
    found = list(itertools.islice(free, count))
    if len(found) < count:
        raise ConfigError(f"found only {len(found)} free ports on {host}, {count} are needed")
    return found


def is_free(host: str, port: int) -> bool:
    """Whether it can be bound. `host`: numeric address."""
    if (holder := hold(host, port)) is not None:
        holder.close()
    return holder is not None


class PortBlocks:
    """Neighbouring ports, a block for each instance, held as long as it is there: bound, and nobody listens.

    On such a port a server of ours may listen (all set SO_REUSEADDR), and nobody else gets it: neither by looking for a
    free one, as agents of other deployments do, nor as the port of an outgoing connection.

    Args:
        host: numeric address. within: to choose from, as of `free_ports`.
    """

    def __init__(self, host: str, within: range = range(0)) -> None:
        self._host = host
        self._within = within or _not_ephemeral()
        self._held: dict[int, socket.socket] = {}

    def take(self, count: int) -> int:
        """Hold the next block that is free. Returns its first port, 0 where none is wanted.

        Raises:
            ConfigError: there is none.
        """
        if not count:
            return 0
        for first in _shuffled(range(self._within.start, self._within.stop - count + 1, count)):
            if self._hold(range(first, first + count)):
                return first
        last = self._within.stop - 1
        raise ConfigError(f"no {count} free ports in a row on {self._host} in {self._within.start}-{last}")

    def adopt(self, first: int, count: int) -> None:
        """Hold what nobody listens on of a block that an agent before this one has taken."""
        for port in range(first, first + count):
            self._hold([port], again=True)

    def take_again(self, first: int, count: int) -> int:
        """A block that was taken before, or another one where somebody has come between. Nobody of ours listens there
        now."""
        mine = [port for port in range(first, first + count) if port not in self._held]
        return first if self._hold(mine, again=True) else self.take(count)

    def give_back(self, first: int, count: int) -> None:
        """Harmless for ports that are not held."""
        for port in range(first, first + count):
            if (holder := self._held.pop(port, None)) is not None:
                holder.close()

    def _hold(self, block: Iterable[int], *, again: bool = False) -> bool:
        """Hold all of them, or no more than before."""
        new: dict[int, socket.socket] = {}
        for port in block:
            holder = None if port in self._held else hold(self._host, port, again=again)
            if holder is None:
                for one in new.values():
                    one.close()
                return False
            new[port] = holder
        self._held |= new
        return True


def address_of(host: str, flag: str) -> str:
    """The numeric address by which others reach this machine, IPv4 where it has one: what is bound are addresses.

    Args:
        host: an address or a name; or a network interface, which means another address on each machine.

    Raises:
        ConfigError: a wildcard, a name that nobody knows, or an interface without an address.
    """
    interface = psutil.net_if_addrs().get(host)
    if interface is not None:
        found = [(one.family, one.address) for one in interface if one.family in _FAMILIES and "%" not in one.address]
        if not found:  # an address with a zone is known on its link alone
            raise ConfigError(f"{flag} {host}: this interface has no address", param=flag)
    else:
        try:
            known = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{flag} {host}: no address ({_reason(error)})", param=flag) from error
        found = [(family, str(address[0])) for family, _, _, _, address in known]
    address = str(min(found, key=lambda one: _FAMILIES.index(one[0]))[1])
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError(f"{flag} {host}: give the address by which the other machines reach this one", param=flag)
    return address


def listen(host: str, port: int, *, flags: str = "-") -> socket.socket:
    """A listening socket for the endpoint; connections wait in it until the proxy runs.

    Args:
        flags: what stands before `-port` and `-host` in the flags that errors name.

    Raises:
        ConfigError: the port is in use or needs privileges, or the address is not of this machine.
    """
    if not 1 <= port <= 65535:  # getaddrinfo takes 65536 and means 0
        raise ConfigError(f"port {port} is not between 1 and 65535", param=f"{flags}-port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{flags}-host {host} cannot be resolved: {_reason(error)}", param=f"{flags}-host") from error
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(BACKLOG)
        taken.setblocking(False)
    except OSError as error:
        taken.close()
        why, what = {
            errno.EADDRINUSE: (f"port {port} is in use; end what listens there or use {flags}-port", "port"),
            errno.EACCES: (f"port {port} needs privileges; use {flags}-port above 1023", "port"),
        }.get(error.errno or 0, (f"cannot listen on {host}:{port}: {error.strerror}", "host"))
        raise ConfigError(why, param=f"{flags}-{what}") from error
    return taken


def _reason(error: OSError | UnicodeError) -> str | None:
    return error.strerror if isinstance(error, OSError) else "it is no host name"


@contextlib.contextmanager
def private_socket(path: Path) -> Iterator[socket.socket]:
    """Bound there while the context lasts. Who may use it is the folder's business."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        bound.setblocking(False)
        try:
            yield bound
        finally:
            path.unlink(missing_ok=True)


def hold(host: str, port: int, *, again: bool = False) -> socket.socket | None:
    """A socket that is bound there, alone, and does not listen; None where another one is.

    Args:
        again: connections of a server that has ended may linger on the port.
    """
    version = ipaddress.ip_address(host).version
    holder = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        if again:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
    except OSError:
        holder.close()
        return None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after: a server may share it, another holder not
    return holder


def _shuffled(ports: range) -> list[int]:
    return random.sample(ports, len(ports))


def _not_ephemeral() -> range:
    try:
        highest = int(_EPHEMERAL.read_text(encoding="ascii").split()[0]) - 1
    except OSError:
        highest = 32767
    return range(LOWEST, highest) if highest - LOWEST > 1000 else range(1024, 65535)


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

    A port that is bound to every address may still be narrowed by a filter (`store.addresses`), which no table shows.
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
