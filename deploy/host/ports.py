"""Ports: free loopback ones for the stages, and the public one, taken before anything slow starts.

`proxy.server.uvicorn_server` can bind too; it is not imported here because its web framework takes longer to load than
all of the launcher, and the stages should be loading theirs meanwhile.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from epd_serve.errors import ConfigError

LOWEST = 20000
BACKLOG = 2048
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct free ports, below the range from which the kernel takes ports of outgoing connections.

    A stage binds its port only half a minute later; an outgoing connection must not get it meanwhile.

    Raises:
        ConfigError: not enough free ports.
    """
    highest = _ephemeral_start() - 1
    candidates = list(range(LOWEST, highest)) if highest - LOWEST > 1000 else list(range(1024, 65535))
    random.shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            return found
        if _is_free(host, port):
            found.append(port)
    raise ConfigError(f"found only {len(found)} free ports on {host}, {count} are needed")


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


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _ephemeral_start() -> int:
    try:
        return int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
