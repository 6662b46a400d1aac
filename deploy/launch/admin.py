"""The admin listener of a deployment: its socket and its key, by the flags. `proxy/http/admin.py` is what answers
there."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deploy.host.ports import listen
from epd_serve.errors import ConfigError
from epd_serve.key_files import read_key

if TYPE_CHECKING:
    from proxy.registry.table import InstanceTable

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Admin:
    """`listening`: bound. `key`: what `/metrics` and `/instances` want, or ""."""

    listening: socket.socket
    key: str = field(repr=False)


@contextmanager
def open_admin(host: str, port: int, key_file: str) -> Iterator[Admin | None]:
    """The listener while the context lasts, or None where `port` is 0.

    Raises:
        ConfigError: the port is in use, the key file is nobody's secret, or others reach the port and there is no key.
    """
    if not port:
        if key_file:
            raise ConfigError("--admin-key-file needs --admin-port", param="--admin-port")
        yield None
        return
    key = read_key(key_file, "--admin-key-file") if key_file else ""
    if not key and not _is_loopback(host):
        raise ConfigError(
            f"--admin-host {host}: others reach it, so it needs a key: give a file with one by --admin-key-file",
            param="--admin-key-file",
        )
    with listen(host, port, flags="--admin") as listening:
        yield Admin(listening, key)


async def serve_admin(
    admin: Admin, table: InstanceTable, metrics: Callable[[], Awaitable[bytes]], *, grace_s: float, **more: Any
) -> None:
    """Answer there until cancelled; its socket is closed at the end. `more`: of `proxy.http.admin.create_admin`."""
    from proxy.http.admin import create_admin
    from proxy.server.uvicorn_server import serve

    app = create_admin(table, metrics, key=admin.key, **more)
    await serve(app, sockets=[admin.listening], grace_s=grace_s)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
