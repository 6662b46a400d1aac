"""Where the commands are answered: a socket in the run directory, for whoever may read that, and the admin listener."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fastapi import APIRouter

from proxy.background import Background
from proxy.http.admin import create_admin
from proxy.registry.table import InstanceTable
from proxy.server.uvicorn_server import serve


@contextmanager
def private_socket(path: Path) -> Iterator[socket.socket]:
    """Bound there while the context lasts. Who may use it is the folder's business."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        bound.setblocking(False)
        try:
            yield bound
        finally:
            path.unlink(missing_ok=True)


async def answer(
    path: Path,
    table: InstanceTable,
    metrics: Callable[[], Awaitable[bytes]],
    routes: Sequence[APIRouter],
    *,
    admin: tuple[socket.socket, str] | None = None,
    grace_s: float = 1.0,
    background: Background | None = None,
) -> None:
    """Until cancelled.

    Args:
        admin: the operator's listener, bound, and its key or "".
    """
    with private_socket(path) as own:
        async with asyncio.TaskGroup() as group:
            for listening, key in ((own, ""), *([admin] if admin is not None else [])):
                app = create_admin(table, metrics, key=key, more=routes)
                group.create_task(
                    serve(app, "", 0, sockets=[listening], grace_s=grace_s, background=background or Background())
                )
