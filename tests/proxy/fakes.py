"""Stages and a proxy for tests: real uvicorn servers on free ports, so that streaming and disconnects are real."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from PIL import Image
from starlette.types import Receive, Scope, Send

from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.admission.gate import Gate, Pass
from proxy.admission.queue import Kind
from proxy.background import Background
from proxy.config.keys import ApiKey, ApiKeys, digest
from proxy.config.limits import MediaLimits, MigrationLimits, PoisonLimits, RetryLimits, Timeouts
from proxy.config.settings import ModelIdentity, ProxySettings
from proxy.context import RequestContext, Services
from proxy.http.app import create_app
from proxy.media.loader import LoadedItem
from proxy.metrics import Metrics
from proxy.pipeline import Pipeline
from proxy.records.record import Record
from proxy.registry.feature_directory import FeatureDirectory
from proxy.registry.table import InstanceTable
from proxy.request.client import ClientSink
from proxy.request.parse import ParsedRequest
from proxy.stages.circuits import Circuits, RetryBudget, StallWatchdog
from proxy.stages.history import HistoryRoom, TokenHistory
from proxy.stages.poison import Poison
from tests.waiting import PATIENCE_S

MODEL = "demo"
QUICK = Timeouts(  # but for instances that are missing: a test that means another deadline names it
    connect_s=20.0, encode_s=60.0, first_byte_s=60.0, idle_s=60.0, total_s=90.0, instance_wait_s=0.3
)  # fmt: skip


def document(config: ProxySettings) -> dict[str, Any]:
    """What a proxy with these settings has at /openapi.json."""
    return create_app(config, InstanceTable()).openapi()


@dataclass(frozen=True)
class Call:
    """One request that a fake stage got."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Behaviour = Callable[["FakeStage", Call, Receive, Send], Awaitable[None]]


class FakeStage:
    """An OpenAI server that does as `script` says, request by request, and as `usual` when the script is over."""

    def __init__(self, instance_id: str, role: Role) -> None:
        self.id = instance_id
        self.role = role
        self.calls: list[Call] = []
        self.script: deque[Behaviour] = deque()
        self.usual: Behaviour = answer
        self.cancelled = 0
        self.active = 0
        self.changed = asyncio.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        call = Call(scope["path"], headers, json.loads(raw))
        self.calls.append(call)
        await self._note(active=1)
        try:
            await (self.script.popleft() if self.script else self.usual)(self, call, receive, send)
        finally:
            await self._note(active=-1)

    async def _note(self, *, active: int = 0, cancelled: int = 0) -> None:
        async with self.changed:
            self.active += active
            self.cancelled += cancelled
            self.changed.notify_all()

    async def wait_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await self._note(cancelled=1)

    @property
    def keys(self) -> list[list[str]]:
        """The items' keys, call by call."""
        return [[part["uuid"] for part in parts(call)] for call in self.calls]

    async def until(self, condition: Callable[[FakeStage], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: condition(self))


def parts(call: Call) -> list[dict[str, Any]]:
    """The parts of a request that stand for media."""
    messages = call.body["messages"]
    return [part for message in messages for part in message["content"] if isinstance(part, dict) and "uuid" in part]


# Behaviours.


def chunk(text: str, **more: Any) -> bytes:
    body = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}], **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def opening(index: int) -> bytes:
    """What vLLM's chat streams begin with: the role, once per choice."""
    delta = {"role": "assistant", "content": ""}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


GRID = {"image_grid_thw": [1, 4, 4]}
DONE = b"data: [DONE]\n\n"
INTERNALS = {"kv_transfer_params": {"ok": True}, "ec_transfer_params": None, "prompt_token_ids": [1, 2]}


async def live(receive: Receive, send: Send) -> None:
    """An application's lifespan, in which it does nothing."""
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


async def _start(send: Send, status: int = 200, kind: bytes = b"application/json") -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def _body(send: Send, data: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def answer(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
    if call.body.get("stream"):
        await _start(send, kind=b"text/event-stream")
        for event in (chunk("a"), chunk("b"), DONE):
            await _body(send, event, more=True)
        await _body(send, b"")
        return
    choices = [{"index": i, "message": {"content": f"from {stage.id}"}} for i in range(call.body.get("n") or 1)]
    counted = {"count": 3} if call.path == "/tokenize" else {}
    body = {"object": "chat.completion", "choices": choices, **INTERNALS, **counted}
    await replies(200, body)(stage, call, receive, send)


def replies(status: int, body: Any) -> Behaviour:
    async def behave(_: FakeStage, __: Call, ___: Receive, send: Send) -> None:
        await _start(send, status)
        await _body(send, json.dumps(body).encode())

    return behave


def refuses(status: int, message: str, param: str | None = None) -> Behaviour:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": status}
    return replies(status, {"error": error})


def encodes(**metadata: Any) -> Behaviour:
    """Answer as an encoder of vLLM 0.32 does, every item with this metadata (default: of an image)."""

    async def behave(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
        entries: dict[str, Any] = {}
        for index, part in enumerate(parts(call)):
            entry = entries.setdefault(part["uuid"], {"item_indices": [], "metadata": metadata or GRID})
            entry["item_indices"].append(index)
        body = {"object": "chat.completion", "choices": [], "ec_transfer_params": entries}
        await replies(200, body)(stage, call, receive, send)

    return behave


def once(released: asyncio.Event, then: Behaviour) -> Behaviour:
    """Wait for `released`, or for the proxy to leave."""

    async def behave(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
        leaves = asyncio.create_task(stage.wait_disconnect(receive))
        waits = asyncio.create_task(released.wait())
        await asyncio.wait([leaves, waits], return_when=asyncio.FIRST_COMPLETED)
        left = leaves.done()
        for task in (leaves, waits):
            task.cancel()
        if not left:
            await then(stage, call, receive, send)

    return behave


async def hangs(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
    await stage.wait_disconnect(receive)


def streams(*events: bytes, then: str = "end") -> Behaviour:
    """Send `events`, then `end` the response, `break` the connection, or `hang` until the proxy leaves."""

    async def behave(stage: FakeStage, call: Call, receive: Receive, send: Send) -> None:
        await _start(send, kind=b"text/event-stream")
        for event in events:
            await _body(send, event, more=True)
        if then == "end":
            await _body(send, b"")
        elif then == "hang":
            await stage.wait_disconnect(receive)

    return behave


breaks = streams(then="break")


# The cluster.


@dataclass
class Cluster:
    """A proxy in front of fake stages."""

    stages: dict[str, FakeStage]
    table: InstanceTable
    client: httpx.AsyncClient
    app: FastAPI
    instances: dict[str, Instance]

    def __getitem__(self, instance_id: str) -> FakeStage:
        return self.stages[instance_id]

    def metric(self, name: str, **labels: str) -> float:
        return self.app.state.pipeline.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def pipeline(self) -> Pipeline:
        pipeline: Pipeline = self.app.state.pipeline
        return pipeline

    async def ask(self, *urls: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        """One chat request with images."""
        return await self.client.post("/v1/chat/completions", json=image_body(*urls, **more), headers=headers)

    async def until_metric(self, name: str, value: float, **labels: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.metric(name, **labels) < value:
                await asyncio.sleep(0.002)

    async def aborted_stream(
        self, body: dict[str, Any], path: str = "/v1/chat/completions", begun: asyncio.Event | None = None
    ) -> bytes:
        """What a stream brought before the proxy aborted its connection; fails when it did not. Sets `begun`."""
        received = b""
        try:
            async with self.client.stream("POST", path, json=body) as response:
                async for part in response.aiter_bytes():
                    received += part
                    if begun is not None:
                        begun.set()
        except httpx.RemoteProtocolError:
            return received
        raise AssertionError(f"the stream ended well: {received!r}")

    async def idle(self) -> None:
        """Wait until nothing is in flight anywhere; fails after a while, naming what is left."""
        async with asyncio.timeout(PATIENCE_S):
            while counted(self.table) or self.metric("epd_proxy_in_flight"):
                await asyncio.sleep(0.005)
        queue = self.pipeline.gate.queue
        assert not queue.anybody and not any(queue.owed.values()) and not any(queue.work_s.values()), "in the lines"
        assert not self.pipeline.gate.waiters
        assert all((use.waiting, use.encoding, use.served) == (0, 0, 0) for use in queue.use.values()), "of places"
        for stage in self.stages.values():
            await stage.until(lambda stage: stage.active == 0)


def in_flight(table: InstanceTable) -> int:
    """Leases that are not released yet, on instances that are there."""
    return sum(sum(view.in_flight.values()) for view in table.snapshot())


def counted(table: InstanceTable) -> int:
    """The same with what is counted aside of them."""
    lives = [view.instance.incarnation_id for view in table.snapshot()]
    return sum(tally.held for life in lives for tally in table._ledger.tallies(life).values())


def api_keys(*words: str, **limits: int) -> ApiKeys:
    """A file with these keys, each named as it is, with these limits."""
    salt = "5a" * 16
    hashes = {word: digest(bytes.fromhex(salt), word.encode()).hex() for word in words}
    return ApiKeys(salt, tuple(ApiKey(word, hash, limits=limits) for word, hash in hashes.items()))


def settings(**changes: Any) -> ProxySettings:
    base = ProxySettings(
        served_models=(MODEL,),
        identity=ModelIdentity(MODEL),
        timeouts=QUICK,
        media=MediaLimits(max_items=4),
        explain=True,
    )
    return replace(base, **changes)


@asynccontextmanager
async def cluster(
    *ids: str, config: ProxySettings | None = None, wanted: Collection[Role] = (), **app_options: Any
) -> AsyncIterator[Cluster]:
    """A proxy with one fake stage per id (`E0`, `PD1`, ...). `wanted`: roles there are to be, or none."""
    stages = {name: FakeStage(name, Role(name.rstrip("0123456789"))) for name in ids}
    table = InstanceTable()
    table.want(wanted)
    instances = {}
    app = create_app(config or settings(), table, **app_options)
    async with AsyncExitStack() as stack:
        for stage in stages.values():
            url = await stack.enter_async_context(served(stage))
            kv = f"ipc:///{stage.id}.kv" if stage.role.sends_kv else None
            instances[stage.id] = Instance(stage.id, stage.role, url, f"{stage.id}-life1", kv)
            table.apply(instances[stage.id])
        url = await stack.enter_async_context(served(app))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False))
        yield Cluster(stages, table, client, app, instances)


@asynccontextmanager
async def another_proxy(c: Cluster, config: ProxySettings | None = None) -> AsyncIterator[Cluster]:
    """A second proxy in front of the same stages."""
    table = InstanceTable()
    for instance in c.instances.values():
        table.apply(instance)
    app = create_app(config or settings(), table)
    async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        yield Cluster(c.stages, table, client, app, c.instances)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """`app` on a real uvicorn at a free port, ended at once: uvicorn's own shutdown takes 0.2 s of sleeps."""
    listening = bound()
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listening])
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        tasks = list(server.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.lifespan.shutdown()
        listening.close()


def bound() -> socket.socket:
    """At a free port of loopback; connections are refused until somebody listens there."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # known as TCP: no delays
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", 0))
    taken.setblocking(False)
    return taken


_bound: list[socket.socket] = []


def refused_instance(instance_id: str, role: Role) -> Instance:
    """An instance at an address where nothing listens, nor ever will: the port stays bound."""
    _bound.append(bound())
    return Instance(instance_id, role, f"http://127.0.0.1:{_bound[-1].getsockname()[1]}", "dead")


# Requests.


def context(request: ParsedRequest, items: Collection[LoadedItem] = (), request_id: str = "r") -> RequestContext:
    """Of a request that has been admitted and loaded, by a gate of its own. Nobody hears its answer."""

    async def nobody(_: object) -> None: ...

    ctx = RequestContext(request_id, request.endpoint, ClientSink(nobody, {}), Record(request_id))
    gate = Gate(settings(), InstanceTable(), Metrics())
    ctx.request, ctx.base, ctx.items = request, request.body, tuple(items)
    ctx.tokens = float(sum(item.tokens for item in items))
    ctx.watched = Poison(PoisonLimits(), Metrics()).watched(b"{}")
    ctx.history = TokenHistory(HistoryRoom(MigrationLimits()))
    ctx.passed = passed(gate, Kind.MEDIA if items else Kind.TEXT, record=ctx.record).__enter__()
    return ctx


def passed(gate: Gate, kind: Kind = Kind.TEXT, *, record: Record | None = None, **more: Any) -> Pass:
    """What lets a request through this gate, which arrives now; nothing of it is to be encoded."""
    record = Record("") if record is None else record
    return Pass(gate.queue, kind, arrived=gate.queue.now(), gate=gate, record=record, **more)


def services(table: InstanceTable, stages: Any, config: ProxySettings | None = None) -> Services:
    """What steps share, over stages that are called through `stages`. Nobody announces anything."""
    metrics, directory = Metrics(), FeatureDirectory(64)
    dispatcher, watchdog = SimpleNamespace(directory=directory), StallWatchdog(table, 60.0, Background())
    circuits, budget = Circuits(table, metrics), RetryBudget(RetryLimits(), now=0.0)
    return Services(config or settings(), metrics, table, stages, circuits, budget, watchdog, dispatcher)  # type: ignore[arg-type]


def image_file(width: int = 8, height: int = 8, color: str = "red", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, kind)
    return file.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def text_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **more}


def image_body(*urls: str, **more: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what is this?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls or (data_url(image_file()),)]
    return {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 4, **more}
