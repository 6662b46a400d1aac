"""What a node answers over HTTP (`deploy/runtime/node_api.py` says how): calls of its agent and of its front doors, and
before it has any, what it is and what it is told.

Whoever asked may go and come again, or be another one: what was accepted goes on.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from deploy.agent.agent import Agent
from deploy.host.event_loop import together
from deploy.host.state import State
from deploy.node.front import NodeFront
from deploy.node.setup import NodeInfo
from deploy.runtime.node_api import (
    EPOCH_HEADER,
    FAILED,
    JSON,
    NOT_SET_UP,
    NOT_YET,
    REFUSED,
    SUPERSEDED,
    WAIT_S,
    FrontState,
    FrontStatus,
    LostError,
    NodeStatus,
    Refusal,
    Seen,
    SupersededError,
    until_lost,
)
from deploy.runtime.protocol import Order
from deploy.runtime.secrets import OPEN, NodeSecrets
from epd_serve.errors import ConfigError, EpdError
from epd_serve.peers import Peer
from epd_serve.roles import Role
from proxy.records.records import Question
from proxy.server.shared_listener import SharedListener
from proxy.server.uvicorn_server import serve

EPOCH = "epoch"
"""The section of the state that says which is the latest."""

LINES = 200
"""For the operator, that are kept for a controller that does not ask for a while."""

LOOK_S = 0.25
"""Between two looks at how the front doors are, for those who watch: people, in the end."""

logger = logging.getLogger(__name__)
T = TypeVar("T")

Calls = Mapping[str, tuple[Callable[..., Awaitable[Any]], Any]]
"""What can be called by which name, and the type of all its arguments together. Raises EpdError."""


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

    @property
    def instances(self) -> int:
        """How many there are, those that start or end, too."""
        return len(self._seen.value.instances) if self._seen.value is not None else 0

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
        self.epoch = int(state.read(EPOCH) or b"0")
        self._state = state
        self._over = asyncio.Event()

    async def passed(self, epoch: int, call: Callable[[], Awaitable[T]]) -> T:
        """Its outcome. Raises SupersededError: a later epoch has begun, or begins meanwhile."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._state.write(EPOCH, str(epoch).encode())
            self._over.set()
            self._over = asyncio.Event()
        if epoch < self.epoch:
            raise SupersededError(f"epoch {epoch} is over")
        over = self._over
        try:
            return await until_lost(call(), over)
        except LostError:
            if over.is_set():
                raise SupersededError(f"epoch {epoch} is over") from None
            raise


class About(Protocol):
    """The node process itself."""

    secrets: NodeSecrets

    def ready(self) -> bool:
        """It has been told its deployment, and front doors, where there are to be some, have had all to serve with."""

    async def info(self) -> NodeInfo: ...

    def calls(self) -> Calls:
        """What can be asked of it."""


async def serve_node(
    answer: Callable[[Sequence[Route]], Coroutine[Any, Any, None]],
    state: State,
    watch: NodeWatch,
    agent: Agent,
    front: NodeFront | None,
) -> None:
    """Have these answered, and look after the front doors, until cancelled. `answer`: to whom, and with what beside."""
    fence = Fence(state)
    routes = _routes("/agent", lambda: agent_calls(agent), fence, watch.after)
    async with asyncio.TaskGroup() as group:
        if front is not None:
            status = Watched(front.status())
            routes += _routes("/front", lambda: front_calls(front, fence), fence, status.after)
            group.create_task(front.serve())
            group.create_task(_look(front, status))
        group.create_task(watch.follow(agent))
        group.create_task(answer(routes))


async def serve_about(listening: socket.socket, about: About, routes: Sequence[Route] = ()) -> None:
    """Answer members over TLS what the node process is, and these routes, until cancelled; the socket is closed at the
    end. Without routes it has no deployment yet, which whoever asks for anything else is told."""

    async def health(request: Request) -> Response:
        return Response(status_code=200 if request.url.path == "/health" or about.ready() else 503)

    async def info(request: Request) -> Response:
        return Response(msgspec.json.encode(await about.info()), media_type=JSON)

    app = Starlette(
        routes=[
            *(Route(path, health) for path in OPEN),
            Route("/node", info),
            *_routes("/node", about.calls),
            *(routes or [Route("/{path:path}", _waits, methods=["GET", "POST"])]),
        ]
    )
    await serve_tls(listening, about.secrets, app)


async def serve_tls(listening: socket.socket, secrets: NodeSecrets, app: ASGIApp) -> None:
    """Answer other members over TLS until cancelled; the socket is closed at the end."""
    guarded: Any = secrets.guarded(app)
    shared = SharedListener(listening, lambda: None, secrets.certificate)
    await together(secrets.certificate.watch(), serve(guarded, shared=shared, grace_s=1.0))


def agent_calls(agent: Agent) -> Calls:
    """What `deploy.runtime.node_client.NodeClient` asks."""
    return {
        "start": (agent.start, tuple[Order]),
        "flip": (agent.flip, tuple[str, Role]),
        "share": (agent.share, tuple[Order]),
        "drain": (agent.drain, tuple[str]),
        "stop": (agent.stop, tuple[str, float]),
        "know": (agent.know, tuple[tuple[Peer, ...]]),
        "groups": (agent.groups, tuple[()]),
        "close": (agent.close, tuple[()]),
    }


def front_calls(front: NodeFront, fence: Fence) -> Calls:
    """What `deploy.front.remote.RemoteDoors` asks."""
    doors = front.doors
    return {
        "take_in": (lambda state: front.take_in(state, fence.epoch), tuple[FrontState]),
        "ready": (front.ready, tuple[()]),
        "seen": (doors.seen, tuple[()]),
        "until_empty": (doors.until_empty, tuple[str]),
        "until_quiet": (doors.until_quiet, tuple[str]),
        "pausable_s": (doors.pausable_s, tuple[()]),
        "counted": (doors.counted, tuple[()]),
        "look": (doors.look, tuple[Question]),
        "stamps": (doors.stamps, tuple[list[str]]),
        "time_s": (_time_s, tuple[()]),
        "restart": (front.restart, tuple[str]),
        "idle": (doors.idle, tuple[()]),
        "end": (front.end, tuple[()]),
    }


async def _time_s() -> float:
    return time.monotonic()


async def _look(front: NodeFront, status: Watched[FrontStatus]) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        if (now := front.status()) != status.value:
            status.put(now)


def _routes(
    path: str,
    calls: Callable[[], Calls],
    fence: Fence | None = None,
    after: Callable[[int], Awaitable[Any]] | None = None,
) -> list[Route]:
    """Calls, of the latest epoch alone where there is a fence, and a watch."""

    async def watch(request: Request) -> Response:
        assert after is not None, "that is what it is for"
        return await _answered(request, fence, lambda: after(int(request.query_params["after"])))

    async def call(request: Request) -> Response:
        body = await request.body()
        if (called := calls().get(request.path_params["call"])) is None:
            return await _waits(request)
        method, kinds = called
        return await _answered(request, fence, lambda: method(*msgspec.json.decode(body, type=kinds)))

    watches = [Route(path, watch)] if after is not None else []
    return [*watches, Route(f"{path}/{{call}}", call, methods=["POST"])]


async def _waits(request: Request) -> Response:
    return _refused(NOT_SET_UP, "this node has not been told its deployment")


async def _answered(request: Request, fence: Fence | None, call: Callable[[], Awaitable[Any]]) -> Response:
    waiting = asyncio.timeout(float(request.query_params.get("wait_s", WAIT_S)))
    try:
        async with waiting:
            epoch = int(request.headers.get(EPOCH_HEADER, 0))
            answer = await (fence.passed(epoch, call) if fence is not None else call())
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


def _refused(status: int, message: str, param: str | None = None) -> Response:
    return Response(msgspec.json.encode(Refusal(message, param)), status, media_type=JSON)
