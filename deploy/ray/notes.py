"""What has to survive the controller, in the key-value store of the cluster's head (GCS).

It lives as long as the cluster does. Where the head is set up to survive its own end (Redis), so do the notes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ray.exceptions import RayError
from ray.experimental import internal_kv

from deploy.ray.cluster import NAMESPACE

RETRY_S = 0.5
EPOCH = "epoch"

logger = logging.getLogger(__name__)


class GcsNotes:
    """`Notes` of one deployment. To be written in an event loop, which no write holds up: the head may be away."""

    def __init__(self, deployment: str) -> None:
        self._namespace = f"{NAMESPACE}/{deployment}".encode()
        self._unwritten: dict[str, bytes] = {}
        self._writing: asyncio.Task[None] | None = None

    def read(self, name: str) -> bytes | None:
        if name in self._unwritten:
            return self._unwritten[name]
        kept: bytes | None = internal_kv._internal_kv_get(name, namespace=self._namespace)
        return kept

    def write(self, name: str, content: bytes) -> None:
        self._unwritten[name] = content
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="notes")

    async def kept(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def next_epoch(self) -> int:
        """A number above that of every controller before this one."""
        epoch = int(self.read(EPOCH) or b"0") + 1
        internal_kv._internal_kv_put(EPOCH, str(epoch).encode(), overwrite=True, namespace=self._namespace)
        return epoch

    async def forget(self) -> None:
        """All of them."""
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writing
        await asyncio.to_thread(internal_kv._internal_kv_del, b"", del_by_prefix=True, namespace=self._namespace)

    async def _write(self) -> None:
        while self._unwritten:
            name, content = next(iter(self._unwritten.items()))
            try:
                await asyncio.to_thread(
                    internal_kv._internal_kv_put, name, content, overwrite=True, namespace=self._namespace
                )
            except (RayError, RuntimeError) as error:
                logger.warning("the cluster's head takes no note: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if self._unwritten[name] is content:  # else a newer one waits
                del self._unwritten[name]
