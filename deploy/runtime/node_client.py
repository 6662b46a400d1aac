"""The controller's end of a node's HTTP API, the way to a node, and the runtime of that node by it.

A node may be killed and started again, or not be there yet, so each call is repeated until it is answered; all of them
are idempotent. How long that may take is for the caller to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import NoneType
from typing import Any, TypeVar

import httpx
import msgspec

from deploy.runtime.node_api import (
    EPOCH_HEADER,
    JSON,
    NOT_SET_UP,
    NOT_YET,
    REFUSED,
    SUPERSEDED,
    WAIT_S,
    WATCH_S,
    NodeStatus,
    Refusal,
    Seen,
    SupersededError,
)
from deploy.runtime.protocol import Order
from deploy.runtime.secrets import NodeSecrets
from epd_serve.errors import ConfigError, EpdError
from epd_serve.peers import Peer
from epd_serve.roles import Role

RETRY_S, RETRY_MAX_S = 0.05, 1.0
"""After a connection that ended, or that was not to be had; longer each time, for it may be a machine that has gone."""

ANSWER_S = WAIT_S + 10.0

T = TypeVar("T")


class NodeCallError(EpdError):
    """A node has failed at a call. It may be repeated."""

    retryable = True


class NodeTransport(httpx.AsyncBaseTransport):
    """HTTP to a node process, wherever it is now.

    Args:
        members: of whom it is one.
        reach: says where it is, `HOST:PORT`, once it runs. set_up: tells it its deployment. Both raise EpdError; a
            ConfigError is the caller's to hear.
    """

    def __init__(
        self,
        members: NodeSecrets,
        reach: Callable[[], Awaitable[str]],
        set_up: Callable[[], Awaitable[object]],
    ) -> None:
        self._members = members
        limits = httpx.Limits(max_connections=None)
        self._inner: httpx.AsyncBaseTransport = httpx.AsyncHTTPTransport(verify=members.context, limits=limits)
        self._reach = reach
        self._set_up = set_up
        self._address = ""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            self._address = self._address or await self._reach()
            request.url = httpx.URL(f"https://{self._address}").copy_with(raw_path=request.url.raw_path)
            self._members.show(request)
            answer = await self._inner.handle_async_request(request)
            if answer.status_code == NOT_SET_UP:
                await answer.aclose()
                await self._set_up()
                raise httpx.ReadError("the node has begun again", request=request)
            return answer
        except ConfigError:  # nor would it be another time
            self._address = ""
            raise
        except EpdError as error:
            self._address = ""
            raise httpx.ConnectError(str(error), request=request) from error
        except httpx.TransportError:
            self._address = ""
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()


class NodeHttp:
    """Args:
    path: of what is asked there: `/agent`, `/front`, or `/node` for the process itself.
    transport: to the node.
    epoch: in which whoever asks decides; 0 where it has no rivals.
    """

    def __init__(self, path: str, transport: httpx.AsyncBaseTransport, epoch: int = 0) -> None:
        headers = {EPOCH_HEADER: str(epoch)}
        self._path = path
        self._http = httpx.AsyncClient(transport=transport, base_url="http://node", timeout=ANSWER_S, headers=headers)

    async def call(self, name: str, kind: type[T], *arguments: Any) -> T:
        """Its answer, of this type.

        Raises:
            ConfigError: it is refused. SupersededError: another controller has followed this one.
            NodeCallError: the node has failed at it.
        """
        content = msgspec.json.encode(arguments)
        while (answer := await self._answer("POST", f"{self._path}/{name}", content=content)) is None:
            pass
        return _decoded(answer, kind)

    async def get(self, kind: type[T]) -> T:
        """What there is now, at once. Raises NodeCallError."""
        answer = await self._answer("GET", self._path)
        assert answer is not None, "it does not wait"
        return _decoded(answer, kind)

    async def newer(self, kind: type[T], after: int) -> Seen[T] | None:
        """What there is that is newer than what had this number. None: the node answers, and has nothing."""
        answer = await self._answer("GET", self._path, params={"after": after, "wait_s": WATCH_S})
        return _decoded(answer, Seen[kind]) if answer is not None else None  # type: ignore[valid-type]

    async def _answer(self, method: str, path: str, **more: Any) -> bytes | None:
        """Its body; None where that would take longer than the node waits. `more`: of the request."""
        retry_s = RETRY_S
        while True:
            try:
                answer = await self._http.request(method, path, **more)
                if answer.status_code == NOT_YET:
                    return None
                if answer.headers.get("content-type") != JSON:
                    if not answer.is_server_error:
                        raise NodeCallError(f"the node answers {method} {path} with {answer.status_code}")
                    raise httpx.RemoteProtocolError("the node's server is ending")
            except httpx.TransportError:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)
                continue
            if answer.is_success:
                return answer.content
            if answer.status_code == SUPERSEDED:
                raise SupersededError("another controller has followed this one")
            refusal = _decoded(answer.content, Refusal)
            if answer.status_code == REFUSED:
                raise ConfigError(refusal.message, param=refusal.param)
            raise NodeCallError(refusal.message)

    async def close(self) -> None:
        """Nothing more is asked."""
        await self._http.aclose()


class NodeClient:
    """The agent of one node: calls of `Runtime` but for the watch, which raise what those of `NodeHttp` do."""

    def __init__(self, transport: httpx.AsyncBaseTransport, epoch: int = 0) -> None:
        self._http = NodeHttp("/agent", transport, epoch)
        self._life = 0
        self._peers: tuple[Peer, ...] | None = None

    async def start(self, order: Order) -> None:
        await self._http.call("start", NoneType, order)

    async def flip(self, id: str, role: Role) -> None:
        await self._http.call("flip", NoneType, id, role)

    async def share(self, order: Order) -> None:
        await self._http.call("share", NoneType, order)

    async def drain(self, id: str) -> None:
        await self._http.call("drain", NoneType, id)

    async def stop(self, id: str, grace_s: float) -> None:
        await self._http.call("stop", NoneType, id, grace_s)

    async def status(self, after: int = 0) -> Seen[NodeStatus] | None:
        """As of `NodeHttp.newer`; soon where there is nothing newer, and whatever there is by default."""
        seen = await self._http.newer(NodeStatus, after)
        if seen is not None and seen.life != self._life:
            if self._peers is not None:
                await self.know(self._peers)  # the node may have begun again with nothing
            self._life = seen.life
        return seen

    async def know(self, peers: tuple[Peer, ...]) -> None:
        """These are there on other nodes, and no others."""
        self._peers = peers
        await self._http.call("know", NoneType, peers)

    async def groups(self) -> dict[str, int]:
        """Process groups that run now: of the instances, of the template, of Mooncake's master, by name."""
        return await self._http.call("groups", dict[str, int])

    async def close(self) -> None:
        """End all instances and what they share; returns when nothing of it is left."""
        await self._http.call("close", NoneType)

    async def disconnect(self) -> None:
        await self._http.close()


def _decoded(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise NodeCallError(f"the node answers what it cannot answer: {error}") from error
