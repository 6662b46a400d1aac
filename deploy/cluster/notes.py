"""What has to survive the controller: every node keeps it, and the next controller takes the newest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from types import NoneType

import httpx
import msgspec

from deploy.cluster.hosts import Host, Hosts
from deploy.node.setup import NodeInfo, Notes
from deploy.runtime.node_api import Following
from deploy.runtime.node_client import NodeHttp
from deploy.runtime.secrets import NodeSecrets
from epd_serve.errors import EpdError

KEPT_S = 2.0
"""A node that does not answer for so long need not know what the others know."""

HELD_S = 5.0
"""For a node to say what it keeps."""

logger = logging.getLogger(__name__)


async def left_behind(
    hosts: Hosts, there: Sequence[Host], members: NodeSecrets, version: str = ""
) -> tuple[Notes, tuple[Host, ...]]:
    """The newest that any node keeps of a controller before this one, in the latest epoch that any has heard of.

    Args:
        version: of EPD-Serve, of the nodes that count; "": all do.

    Returns:
        That, and the hosts without those whose nodes are of another version: these serve on for the controller
        that they have had.
    """

    async def of(host: Host) -> NodeInfo:
        with contextlib.suppress(TimeoutError, EpdError, httpx.HTTPError):
            async with asyncio.timeout(HELD_S):
                if address := await hosts.find(host.id):
                    async with members.client(address, HELD_S) as http:
                        content = (await http.get("/node")).content
                    try:
                        return msgspec.json.decode(content, type=NodeInfo)
                    except msgspec.MsgspecError:
                        return NodeInfo(version="unknown")
        return NodeInfo()

    told = await asyncio.gather(*(of(one) for one in there))
    ours = {host: info for host, info in zip(there, told, strict=True) if version in ("", info.version)}
    notes = max((info.notes for info in ours.values()), key=lambda one: one.age, default=Notes())
    return Notes(max((info.epoch for info in ours.values()), default=0), 0, notes.sections), tuple(ours)


class NodeNotes(Following):
    """A `deploy.host.state.State`, in one event loop.

    Args:
        noted: what controllers before this one have left.
        epoch: of this controller, above that of those before it.
    """

    def __init__(self, noted: Notes, epoch: int) -> None:
        super().__init__(logger.warning)
        self.epoch = epoch
        self._now = Notes(epoch, 0, noted.sections)
        self._known: dict[str, Notes] = {}  # by node: what it has, as far as we know
        self._changed = asyncio.Event()

    @property
    def empty(self) -> bool:
        """Nobody has written anything, as far as any node knows that answers."""
        return not self._now.sections

    def read(self, name: str) -> bytes | None:
        return self._now.sections.get(name)

    def write(self, name: str, content: bytes) -> None:
        if self._now.sections.get(name) != content:
            self._now = Notes(self.epoch, self._now.number + 1, {**self._now.sections, name: content})
            self._tell()

    async def kept(self) -> None:
        """All nodes have it that answer."""
        wanted = self._now.number
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEPT_S):
                while any(known.number < wanted for known in self._known.values()):
                    await self._changed.wait()

    def given(self, node: str) -> Notes:
        """All of it, for a node that is told with its deployment."""
        self._known[node] = self._now
        return self._now

    def join(self, node: str, http: NodeHttp) -> None:
        """It is told of what is written from now on, and what it does not know yet."""
        self._known.setdefault(node, Notes(number=-1))
        self.keep(node, http.close, self.repeat(partial(self._inform, node, http), f"{node} keeps no notes"))

    def lose(self, node: str) -> None:
        self._known.pop(node, None)
        self.drop(node)
        self._tell()

    async def _inform(self, node: str, http: NodeHttp) -> None:
        now, known = self._now, self._known[node]
        if now is known:
            await self._changed.wait()
            return
        news = {name: content for name, content in now.sections.items() if known.sections.get(name) != content}
        await http.call("notes", NoneType, Notes(now.epoch, now.number, news))
        if self._known[node] is known:  # else it has been told all anew meanwhile
            self._known[node] = now
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
