"""What has to survive the controller, in the key-value store of the cluster's head (GCS).

It lives as long as the cluster does. Where the head is set up to survive its own end (Redis), so do the notes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ray.exceptions import RayError

from deploy.ray.cluster import NAMESPACE
from deploy.ray.private import kv_delete, kv_get, kv_list, kv_put

RETRY_S = 0.5
EPOCH = "epoch"

logger = logging.getLogger(__name__)


class GcsNotes:
    """`State` of one deployment, which one controller at a time writes. They are fetched once (`load`) and then read
    from memory: the head may be away, and neither a read nor a write holds up the event loop."""

    def __init__(self, deployment: str) -> None:
        self._namespace = _namespace(deployment)
        self._notes: dict[str, bytes] | None = None
        self._unwritten: dict[str, bytes] = {}
        self._writing: asyncio.Task[None] | None = None

    async def load(self) -> GcsNotes:
        """Fetch those of the controllers before this one. Once, before anything is read or written. Returns itself."""
        self._notes = await asyncio.to_thread(self._fetched)
        return self

    def read(self, name: str) -> bytes | None:
        assert self._notes is not None, "loaded"
        return self._notes.get(name)

    def write(self, name: str, content: bytes) -> None:
        assert self._notes is not None, "loaded"
        self._notes[name] = self._unwritten[name] = content
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="notes")

    async def kept(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def next_epoch(self) -> int:
        """A number above that of every controller before this one. Waits for the head: not for an event loop."""
        epoch = int(kv_get(EPOCH, namespace=self._namespace) or b"0") + 1
        kv_put(EPOCH, str(epoch).encode(), overwrite=True, namespace=self._namespace)
        return epoch

    async def forget(self) -> None:
        """All of them."""
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writing
        self._notes, self._unwritten = {}, {}
        await asyncio.to_thread(kv_delete, b"", del_by_prefix=True, namespace=self._namespace)

    def _fetched(self) -> dict[str, bytes]:
        names = kv_list(b"", namespace=self._namespace)
        fetched = {name.decode(): kv_get(name, namespace=self._namespace) for name in names}
        return {name: content for name, content in fetched.items() if content is not None}

    async def _write(self) -> None:
        while self._unwritten:
            name, content = next(iter(self._unwritten.items()))
            try:
                await asyncio.to_thread(kv_put, name, content, overwrite=True, namespace=self._namespace)
            except (RayError, RuntimeError) as error:
                logger.warning("the cluster's head takes no note: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if self._unwritten[name] is content:  # else a newer one waits
                del self._unwritten[name]


def write_note(deployment: str, name: str, content: bytes) -> None:
    """For the next controller of a deployment that is not ours. Waits for the head: not for an event loop."""
    kv_put(name, content, overwrite=True, namespace=_namespace(deployment))


def _namespace(deployment: str) -> bytes:
    return f"{NAMESPACE}/{deployment}".encode()
