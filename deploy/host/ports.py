"""Ports: free ones for stages, held until they listen, and the public one, taken before anything slow starts.

`proxy.server.uvicorn_server` can bind too; it is not imported here because its web framework takes longer to load than
all of the launcher, and the stages should be loading theirs meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from epd_serve.errors import ConfigError

LOWEST = 20000
BACKLOG = 2048
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_IF_INET6 = Path("/proc/net/if_inet6")
_GLOBAL = "00"
_SIOCGIFADDR = 0x8915


def free_ports(count: int, host: str = "127.0.0.1", within: range = range(0)) -> list[int]:
    """Distinct free ports.

    Args:
        host: numeric address. within: to choose from; by default those below the range from which the kernel takes
            ports of outgoing connections, which must not get what a stage binds only half a minute later.

    Raises:
        ConfigError: not enough free ports.
    """
    found: list[int] = []
    for port in _shuffled(within or _not_ephemeral()):
        if len(found) == count:
            break
        if (holder := hold(host, port)) is not None:
            holder.close()
            found.append(port)
    if len(found) < count:
        raise ConfigError(f"found only {len(found)} free ports on {host}, {count} are needed")
    return found


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
            if (holder := hold(self._host, port, again=True)) is not None:
                self._held[port] = holder

    def take_again(self, first: int, count: int) -> int:
        """A block that was taken before, or another one where somebody has come between. Nobody of ours listens there
        now."""
        block = range(first, first + count)
        return first if self._hold(block, again=True) else self.take(count)

    def give_back(self, first: int, count: int) -> None:
        """Harmless for ports that are not held."""
        for port in range(first, first + count):
            if (holder := self._held.pop(port, None)) is not None:
                holder.close()

    def _hold(self, block: Sequence[int], *, again: bool = False) -> bool:
        """Hold all of them, or no more than before."""
        new: dict[int, socket.socket] = {}
        for port in block:
            if port in self._held and again:
                continue
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
    if host in (name for _, name in socket.if_nameindex()):
        return _address_at(host, flag)
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no host name"
        raise ConfigError(f"{flag} {host}: no address ({reason})", param=flag) from error
    address = str(sorted(found, key=lambda one: one[0] != socket.AF_INET)[0][4][0])
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError(f"{flag} {host}: give the address by which the other machines reach this one", param=flag)
    return address


def _address_at(interface: str, flag: str) -> str:
    """Linux: see netdevice(7) and /proc/net/if_inet6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in _IF_INET6.read_text(encoding="ascii").splitlines():
            packed, _, _, scope, _, name = line.split()
            if name == interface and scope == _GLOBAL:
                return str(ipaddress.IPv6Address(bytes.fromhex(packed)))
    raise ConfigError(f"{flag} {interface}: this interface has no address", param=flag)


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
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name at all
        reason = error.strerror if isinstance(error, OSError) else "it is no host name"
        raise ConfigError(f"{flags}-host {host} cannot be resolved: {reason}", param=f"{flags}-host") from error
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(BACKLOG)
        taken.setblocking(False)
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            fix = f"end what listens there or use {flags}-port"
            raise ConfigError(f"port {port} is in use; {fix}", param=f"{flags}-port") from None
        if error.errno == errno.EACCES:
            fix = f"use {flags}-port above 1023"
            raise ConfigError(f"port {port} needs privileges; {fix}", param=f"{flags}-port") from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", param=f"{flags}-host") from error
    return taken


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
    highest = _ephemeral_start() - 1
    return range(LOWEST, highest) if highest - LOWEST > 1000 else range(1024, 65535)


def _ephemeral_start() -> int:
    try:
        return int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
