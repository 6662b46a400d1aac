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
    from starlette.requests import Request

    from deploy.front.all_doors import AllDoors
    from deploy.front.doors import FrontDoors
    from deploy.options.config import EndpointConfig
    from proxy.page.routes import Page
    from proxy.registry.table import InstanceTable

    Fronts = FrontDoors | AllDoors


@dataclass(frozen=True)
class Admin:
    """`listening`: bound. `key`: what all but `/health` wants; "" and nothing is changed, but on a unix socket."""

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
    admin: Admin,
    table: InstanceTable,
    metrics: Callable[[], Awaitable[bytes]],
    *,
    grace_s: float,
    page: Page | None = None,
    **more: Any,
) -> None:
    """Answer there until cancelled; its socket is closed at the end. `more`: of `proxy.http.admin.create_admin`."""
    from proxy.http.admin import create_admin
    from proxy.server.uvicorn_server import serve

    trusted = admin.listening.family == socket.AF_UNIX
    app = create_admin(table, metrics, key=admin.key, trusted=trusted, **more)
    if page is None:
        return await serve(app, sockets=[admin.listening], grace_s=grace_s)
    app.include_router(page.router)
    await serve(app, sockets=[admin.listening], grace_s=grace_s, ends=page.end)


async def serve_page(admin: Admin, doors: Fronts, config: EndpointConfig, *, grace_s: float, **more: Any) -> None:
    """As `serve_admin`, with the page: all but the playground, which is where models are asked. Whoever changes the
    deployment by it has to have a key."""
    from proxy.http.admin import check_key
    from proxy.page.events import observed
    from proxy.page.routes import About, Page

    def everything(request: Request) -> str:
        check_key(request.headers, admin.key)
        return ""

    key = "admin" if admin.key else ""
    changes = bool(key) and doors.deployment is not None
    about = About(
        key=key, changes=changes, asks=False, clients_port=config.port, clients_tls=bool(config.tls_cert_file)
    )
    page = Page(about, observed(doors), everything)
    await serve_admin(admin, doors.table, doors.metrics, grace_s=grace_s, page=page, **more)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
