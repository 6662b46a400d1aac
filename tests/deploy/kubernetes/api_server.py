"""An API server of a test: pods and the scale of their Deployment, listed, watched and patched over TLS.

What it says has the shape of what a real one has said (`recorded/`): objects are made from recorded ones, refusals are
recorded answers. It can be slow, end watches, forget its history, be away, and have others patch what is patched.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deploy.kubernetes.api import ApiServer
from tests.certificates import certificate
from tests.proxy.fakes import bound

NAMESPACE = "epd"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/epd-node"
RECORDED = Path(__file__).parent / "recorded"
Json = dict[str, Any]


def recorded(name: str) -> Any:
    """What a real API server has said."""
    return json.loads((RECORDED / f"{name}.json").read_bytes())


@dataclass
class FakeApiServer:
    """Attributes:
    folder: gets `account`, the service account of a pod. token: that it takes.
    pods: by name. replicas: of the Deployment.
    slow_s: before any answer. bookmark_s: between two bookmarks of a watch. bookmarks: that were sent.
    deaf: its watches say nothing, and do not end.
    conflicts: so many patches find that another one was first. refusals: answers of the next requests, by status.
    lists, watches: recorded answers of the next lists and watches, in place of what is there.
    asked: method and path of each request, with `watch` or not.
    """

    folder: Path
    token: str = "first"
    pods: dict[str, Json] = field(default_factory=dict)
    replicas: int = 0
    slow_s: float = 0.0
    bookmark_s: float = 60.0
    bookmarks: int = 0
    deaf: bool = False
    conflicts: int = 0
    refusals: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    watches: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._version = 1000
        self._oldest = 0
        self._scaled = self._version
        self._history: list[tuple[int, str, Json]] = []
        self._changed = asyncio.Event()
        self._cut = asyncio.Event()
        self._server: uvicorn.Server | None = None
        self._certificate = certificate(self.folder, "kubernetes")
        self._listening = bound()
        self.port = self._listening.getsockname()[1]
        self.account = self.folder / "account"
        self.account.mkdir()
        (self.account / "namespace").write_text(NAMESPACE)
        (self.account / "ca.crt").write_bytes(Path(self._certificate[0]).read_bytes())
        self.rotate(self.token)

    def rotate(self, token: str) -> None:
        """From now on this token alone is taken."""
        self.token = token
        (self.account / "token").write_text(token)

    def client(self) -> ApiServer:
        return ApiServer(f"https://127.0.0.1:{self.port}", self.account)

    # --- what is there --------------------------------------------------------------------------------------------

    def put(self, pod: Json) -> None:
        """As it is now: others keep what they have seen."""
        name, self._version = pod["metadata"]["name"], self._version + 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        kind = "MODIFIED" if name in self.pods else "ADDED"
        self.pods[name] = pod
        self._tell(kind, pod)

    def annotations(self, name: str) -> dict[str, str]:
        """Of a pod."""
        found: dict[str, str] = self.pods[name]["metadata"]["annotations"]
        return found

    def remove(self, name: str) -> None:
        self._version += 1
        pod = self.pods.pop(name)
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._tell("DELETED", pod)

    def forget(self) -> None:
        """Its history begins now: whoever wants to go on from before gets 410."""
        self._version += 1
        self._oldest = self._version
        self._history.clear()

    def cut(self) -> None:
        """All watches end, in the middle of whatever they say."""
        self._cut.set()
        self._cut = asyncio.Event()

    def scaled(self, replicas: int) -> None:
        """By somebody else."""
        self._version += 1
        self.replicas, self._scaled = replicas, self._version

    def _tell(self, kind: str, pod: Json) -> None:
        self._history.append((self._version, kind, copy.deepcopy(pod)))
        self._changed.set()
        self._changed = asyncio.Event()

    # --- how it answers -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        app = Starlette(
            routes=[
                Route(PODS, self._pods),
                Route(f"{PODS}/{{name}}", self._patch_pod, methods=["PATCH"]),
                Route(f"{DEPLOYMENT}/scale", self._scale, methods=["GET", "PATCH"]),
            ]
        )
        cert, key = self._certificate
        config = uvicorn.Config(app, log_level="critical", lifespan="off", ssl_certfile=cert, ssl_keyfile=key)
        config.load()
        self._server = server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        self._listening = self._listening if self._listening.fileno() >= 0 else _bound_again(self.port)
        await server.startup(sockets=[self._listening])

    async def stop(self) -> None:
        """At once: connections break."""
        server, self._server = self._server, None
        if server is None:
            return
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        tasks = list(server.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()

    async def _begin(self, request: Request) -> Response | None:
        """What is refused."""
        watch = " watch" if request.query_params.get("watch") else ""
        self.asked.append(f"{request.method} {request.url.path}{watch}")
        await asyncio.sleep(self.slow_s)
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _refused("unauthorized")
        return _refused(self.refusals.pop(0)) if self.refusals else None

    async def _pods(self, request: Request) -> Response:
        if (refused := await self._begin(request)) is not None:
            return refused
        asked = request.query_params
        selector = dict(part.split("=") for part in asked["labelSelector"].split(","))
        if asked.get("watch") and self.watches:
            return StreamingResponse(_replayed(self.watches.pop(0)), media_type="application/json")
        if self.lists and not asked.get("watch"):
            return Response((RECORDED / self.lists.pop(0)).read_bytes(), media_type="application/json")
        if asked.get("watch"):
            since = int(asked["resourceVersion"])
            events = self._watch(since, selector, float(asked["timeoutSeconds"]), "allowWatchBookmarks" in asked)
            return StreamingResponse(events, media_type="application/json")
        chosen = [self.pods[name] for name in sorted(self.pods) if _fits(self.pods[name], selector)]
        first, limit = _after(asked.get("continue", "")), int(asked.get("limit", 500))
        page = recorded("list-empty")
        page["metadata"] = {"resourceVersion": str(self._version)}
        if len(chosen) > first + limit:
            page["metadata"]["continue"] = base64.b64encode(str(first + limit).encode()).decode()
            page["metadata"]["remainingItemCount"] = len(chosen) - first - limit
        page["items"] = [{k: v for k, v in pod.items() if k not in ("kind", "apiVersion")} for pod in chosen]
        page["items"] = page["items"][first : first + limit]
        return JSONResponse(page)

    async def _watch(self, since: int, selector: Json, seconds: float, bookmarks: bool) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        until, bookmark_at, cut = loop.time() + seconds, loop.time() + self.bookmark_s, self._cut
        if since < self._oldest:
            yield _line("ERROR", recorded("gone"))
            return
        while self.deaf:
            await asyncio.sleep(0.01)
        while (now := loop.time()) < until and not cut.is_set():
            changed = self._changed
            for version, kind, pod in list(self._history):
                if version > since:
                    since = version
                    if _fits(pod, selector):
                        line = _line(kind, pod)
                        yield line[: len(line) // 2]
                        await asyncio.sleep(0)  # lines are not pieces
                        yield line[len(line) // 2 :]
            if now >= bookmark_at and bookmarks:
                mark = recorded("bookmark")
                mark["metadata"]["resourceVersion"] = str(self._version)
                yield _line("BOOKMARK", mark)
                self.bookmarks += 1
                bookmark_at = now + self.bookmark_s
            waits = [asyncio.create_task(one.wait()) for one in (changed, cut)]
            await asyncio.wait(waits, timeout=min(until, bookmark_at) - now, return_when=asyncio.FIRST_COMPLETED)
            for one in waits:
                one.cancel()
        if cut.is_set():
            yield b'{"type":"MODIFIED","object":{"kind":"Pod","apiVer'

    async def _patch_pod(self, request: Request) -> Response:
        if (refused := await self._begin(request)) is not None:
            return refused
        name = request.path_params["name"]
        if name not in self.pods:
            return _refused("not-found")
        assert request.headers["content-type"] == "application/merge-patch+json"
        pod = merged(self.pods[name], await request.json())
        self.put(pod)
        return JSONResponse(pod)

    async def _scale(self, request: Request) -> Response:
        if (refused := await self._begin(request)) is not None:
            return refused
        if request.method == "PATCH":
            assert request.headers["content-type"] == "application/merge-patch+json"
            patch = await request.json()
            if self.conflicts:
                self.conflicts -= 1
                self.scaled(self.replicas)
            if patch.get("metadata", {}).get("resourceVersion", str(self._scaled)) != str(self._scaled):
                return _refused("conflict")
            self.scaled(patch["spec"]["replicas"])
        scale = recorded("scale")
        scale["metadata"]["resourceVersion"] = str(self._scaled)
        scale["spec"]["replicas"] = self.replicas
        return JSONResponse(scale)


async def _replayed(name: str) -> AsyncIterator[bytes]:
    """The pieces of a watch that was recorded, without the waits between them."""
    for _, piece in watched(name):
        yield piece
        await asyncio.sleep(0)


def watched(name: str) -> list[tuple[float, bytes]]:
    """A watch that was recorded: when each piece came, and its bytes, without how it ended."""
    lines = map(json.loads, (RECORDED / name).read_bytes().splitlines()[:-1])
    return [(at_s, text.encode()) for at_s, text in lines]


def merged(object: Any, patch: Any) -> Any:
    """As a JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = copy.deepcopy(object) if isinstance(object, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _line(kind: str, object: Json) -> bytes:
    return json.dumps({"type": kind, "object": object}, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _refused(name: str) -> Response:
    status = recorded(name)
    return JSONResponse(status, status_code=status["code"])


def _fits(pod: Json, selector: Json) -> bool:
    return all(pod["metadata"]["labels"].get(name) == value for name, value in selector.items())


def _after(token: str) -> int:
    return int(base64.b64decode(token)) if token else 0


def _bound_again(port: int) -> Any:
    import socket

    one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", port))
    one.setblocking(False)
    return one
