"""What a node answers over HTTP (`deploy/runtime/node_api.py` says how): its agent's calls, and its front doors'.

Whoever asked may go and come again, or be another one: what was accepted goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deploy.agent.agent import Agent
from deploy.host.state import State
from deploy.node.front import NodeFront
from deploy.runtime.lost import LostError, SupersededError, until_lost
from deploy.runtime.node_api import (
    EPOCH_HEADER,
    FAILED,
    JSON,
    NOT_YET,
    REFUSED,
    SUPERSEDED,
    WAIT_S,
    FrontState,
    NodeStatus,
    Refusal,
    Seen,
)
from deploy.runtime.protocol import Order
from epd_serve.errors import ConfigError, EpdError
from epd_serve.peers import Peer
from epd_serve.roles import Role
from proxy.records.records import Question
from proxy.server.uvicorn_server import serve

EPOCH = "epoch"
"""The section of the state that says which is the latest."""

LINES = 200
"""For the operator, that are kept for a controller that does not ask for a while."""

LOOK_S = 0.25
"""Between two looks at how the front doors are, for those who watch: people, in the end."""

logger = logging.getLogger(__name__)
T = TypeVar("T")

Handler = Callable[[Request], Awaitable[Any]]
"""Does what a request asks, and returns the answer's body. Raises EpdError."""


class Watched(Generic[T]):
    """A value that changes, for those who wait for that."""

    def __init__(self, value: T) -> None:
        self.value = value
        self.number = self._life = time.monotonic_ns()  # later lives have larger numbers
        self._changed = asyncio.Event()

    def put(self, value: T) -> None:
        self.value = value
        self.number += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, number: int) -> Seen[T]:
        """As soon as there is something newer than this number."""
        while self.number == number:
            await self._changed.wait()
        return Seen(self._life, self.number, self.value)


class NodeWatch:
    """What runs on the node, and what the operator is to read, for the controller that watches."""

    def __init__(self) -> None:
        self._seen: Watched[NodeStatus | None] = Watched(None)
        self._lines: deque[tuple[int, str]] = deque(maxlen=LINES)

    def say(self, line: str) -> None:
        """To the operator; stderr has it, too."""
        print(line, file=sys.stderr, flush=True)
        self._seen.put(self._seen.value)
        self._lines.append((self._seen.number, line))

    async def follow(self, agent: Agent) -> None:
        async for instances in agent.watch():
            self._seen.put(NodeStatus(await agent.nodes(), instances))

    async def after(self, number: int) -> Seen[NodeStatus]:
        """As of `Watched`. 0: whatever there is."""
        seen = await self._seen.after(number)
        while seen.value is None:
            seen = await self._seen.after(seen.number)
        lines = tuple(line for at, line in self._lines if number and at > number)
        return Seen(seen.life, seen.number, msgspec.structs.replace(seen.value, lines=lines))


class Fence:
    """Lets calls of the latest epoch pass. One life after the other remembers it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._epoch = int(state.read(EPOCH) or b"0")
        self._over = asyncio.Event()

    async def passed(self, epoch: int, call: Callable[[], Awaitable[T]]) -> T:
        """Its outcome. Raises SupersededError: a later epoch has begun, or begins meanwhile."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._state.write(EPOCH, str(epoch).encode())
            self._over.set()
            self._over = asyncio.Event()
        if epoch < self._epoch:
            raise SupersededError(f"epoch {epoch} is over")
        over = self._over
        try:
            return await until_lost(call(), over)
        except LostError:
            if over.is_set():
                raise SupersededError(f"epoch {epoch} is over") from None
            raise


class Routes:
    """Requests by method and path."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._routes: list[Route] = []

    def on(self, method: str, path: str) -> Callable[[Handler], Handler]:
        """Decorates what answers them."""

        def added(handler: Handler) -> Handler:
            async def answered(request: Request) -> Response:
                return await self._answered(request, handler)

            self._routes.append(Route(path, answered, methods=[method]))
            return handler

        return added

    def app(self) -> Starlette:
        return Starlette(routes=self._routes)

    async def _answered(self, request: Request, handler: Handler) -> Response:
        waiting = asyncio.timeout(float(request.query_params.get("wait_s", WAIT_S)))
        try:
            async with waiting:
                answer = await self._fence.passed(_epoch(request), lambda: handler(request))
                return Response(msgspec.json.encode(answer), media_type=JSON)
        except SupersededError as error:
            return _refused(SUPERSEDED, error.message)
        except ConfigError as error:
            return _refused(REFUSED, error.message, error.param)
        except EpdError as error:
            return _refused(FAILED, error.message)
        except Exception as error:
            if waiting.expired():
                return Response(status_code=NOT_YET)
            logger.exception("%s %s failed", request.method, request.url.path)
            return _refused(FAILED, f"{type(error).__name__}: {error}")


async def serve_node(
    listening: socket.socket, state: State, watch: NodeWatch, agent: Agent, front: NodeFront | None
) -> None:
    """Answer on this socket until cancelled; it is closed at the end."""
    routes = Routes(Fence(state))
    agent_routes(routes, agent, watch)
    async with asyncio.TaskGroup() as group:
        if front is not None:
            status = Watched(front.status())
            front_routes(routes, front, status)
            group.create_task(_look(front, status))
        group.create_task(watch.follow(agent))
        group.create_task(serve(routes.app(), sockets=[listening], grace_s=1.0))


def agent_routes(routes: Routes, agent: Agent, watch: NodeWatch) -> None:
    """What `deploy.runtime.node_client.NodeClient` asks."""

    @routes.on("GET", "/node")
    async def status(request: Request) -> Any:
        return await watch.after(_number(request))

    @routes.on("POST", "/instances")
    async def start(request: Request) -> None:
        await agent.start(await _body(request, Order))

    @routes.on("PUT", "/instances/{id}/role")
    async def flip(request: Request) -> None:
        await agent.flip(request.path_params["id"], await _body(request, Role))

    @routes.on("POST", "/instances/{id}/drain")
    async def drain(request: Request) -> None:
        await agent.drain(request.path_params["id"])

    @routes.on("DELETE", "/instances/{id}")
    async def stop(request: Request) -> None:
        await agent.stop(request.path_params["id"], float(request.query_params["grace_s"]))

    @routes.on("DELETE", "/instances")
    async def close(request: Request) -> None:
        await agent.close()

    @routes.on("PUT", "/peers")
    async def know(request: Request) -> None:
        await agent.know(await _body(request, tuple[Peer, ...]))

    @routes.on("GET", "/groups")
    async def groups(request: Request) -> Any:
        return await agent.groups()


def front_routes(routes: Routes, front: NodeFront, status: Watched[Any]) -> None:
    """What `deploy.front.remote.RemoteDoors` asks."""

    @routes.on("GET", "/front")
    async def watch(request: Request) -> Any:
        return await status.after(_number(request))

    @routes.on("PUT", "/front")
    async def told(request: Request) -> None:
        await front.take_in(await _body(request, FrontState), _epoch(request))

    @routes.on("DELETE", "/front")
    async def end(request: Request) -> None:
        await front.end()

    @routes.on("GET", "/front/ready")
    async def ready(request: Request) -> None:
        await front.ready()

    @routes.on("GET", "/front/seen")
    async def seen(request: Request) -> None:
        await front.doors.seen()

    @routes.on("GET", "/front/idle")
    async def idle(request: Request) -> None:
        await front.doors.idle()

    @routes.on("GET", "/front/empty/{id}")
    async def empty(request: Request) -> None:
        await front.doors.until_empty(request.path_params["id"])

    @routes.on("GET", "/front/quiet/{id}")
    async def quiet(request: Request) -> None:
        await front.doors.until_quiet(request.path_params["id"])

    @routes.on("GET", "/front/pausable")
    async def pausable_s(request: Request) -> Any:
        seconds = await front.doors.pausable_s()
        return (None,) if math.isinf(seconds) else (seconds,)

    @routes.on("GET", "/front/counts")
    async def counts(request: Request) -> Any:
        return await front.doors.counted()

    @routes.on("POST", "/front/records")
    async def look(request: Request) -> Any:
        return await front.doors.look(await _body(request, Question))

    @routes.on("GET", "/front/time")
    async def time_s(request: Request) -> Any:
        return time.monotonic()

    @routes.on("POST", "/front/stamps")
    async def stamps(request: Request) -> Any:
        return await front.doors.stamps(await _body(request, list[str]))

    @routes.on("PUT", "/front/restarts/{id}")
    async def restart(request: Request) -> None:
        await front.restart(request.path_params["id"])


async def _look(front: NodeFront, status: Watched[Any]) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        if (now := front.status()) != status.value:
            status.put(now)


async def _body(request: Request, kind: type[T]) -> T:
    return msgspec.json.decode(await request.body(), type=kind)


def _number(request: Request) -> int:
    return int(request.query_params.get("after", 0))


def _epoch(request: Request) -> int:
    return int(request.headers.get(EPOCH_HEADER, 0))


def _refused(status: int, message: str, param: str | None = None) -> Response:
    return Response(msgspec.json.encode(Refusal(message, param)), status, media_type=JSON)
