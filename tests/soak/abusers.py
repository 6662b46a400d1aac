"""Clients that take places, memory and time and give nothing for them, and as many that behave, to compare with.

Each kind is a number of connections in a process of its own. Every answer is counted by its status.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

LIMIT_S = 90.0
START_S = 60.0
BODY_BYTES = 1_000_000
LARGE_RATES = (1 << 20, 6 << 20)  # bytes/s of large pictures: one that takes too long, and one that does not


@dataclass(frozen=True)
class Scene:
    """What all of them need to know.

    Attributes:
        behave: they do what others do, at the same pace. arrive: the large pictures come in time.
        malformed: requests for `seconds` together.
    """

    url: str
    model: str
    media: str
    seconds: float
    behave: bool
    malformed: list[bytes] = field(repr=False)
    arrive: bool = False
    seed: int = 0


@dataclass
class Seen:
    """Answers by (kind, what); `what` is a status, with Retry-After or not, or how a connection ended."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def note(self, kind: str, answer: bytes) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        parts = head.split(b" ", 2)
        if len(parts) < 2 or not parts[1].isdigit():
            self.counts[kind, "no answer"] += 1
            return
        status = parts[1].decode()
        retries = b"\r\nretry-after:" in head.lower()
        self.counts[kind, status + (" retry-after" if retries else "")] += 1
        if status.startswith("5") and not retries and len(self.failures) < 20:
            self.failures.append(f"{kind}: {head[:200]!r} {body[:200]!r}")


class Crowd:
    """All connections of one scene."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._host, self._port = urlsplit(scene.url).hostname, urlsplit(scene.url).port
        self._numbers = itertools.count(scene.seed)
        self.seen = Seen()

    async def run(self, numbers: dict[str, int]) -> Seen:
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "slow body": self._slow_body,
            "silent": self._silent,
            "slow reader": self._slow_reader,
            "large url": self._large_url,
        }
        async with asyncio.TaskGroup() as group:
            for kind, number in numbers.items():
                for _ in range(number):
                    group.create_task(self._again_and_again(kind, kinds[kind]))
            group.create_task(self._all_malformed(group))
            await asyncio.sleep(self._scene.seconds)
            for task in list(group._tasks):  # a TaskGroup has no other way to end its tasks
                task.cancel()
        return self.seen

    async def _again_and_again(self, kind: str, once: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await (self._behaving(kind) if self._scene.behave else once())
            except OSError as error:
                self.seen.counts[kind, type(error).__name__] += 1
                await asyncio.sleep(0.5)

    # Those that misbehave.

    async def _slow_body(self) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(self._head("slow-body", BODY_BYTES))
            answered = asyncio.ensure_future(reader.read())
            while not answered.done():
                writer.write(b" ")
                await asyncio.wait([answered], timeout=1.0)
            self.seen.note("slow body", answered.result())
        finally:
            writer.close()

    async def _silent(self) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            await reader.read()
            self.seen.counts["silent", "closed"] += 1
        finally:
            writer.close()

    async def _slow_reader(self) -> None:
        loop, sock = asyncio.get_running_loop(), socket.socket()
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, (self._host, self._port))
            raw = json.dumps(self._text(answer=4000, stream=True)).encode()
            await loop.sock_sendall(sock, self._head("slow-reader", len(raw)) + raw)
            head = await loop.sock_recv(sock, 512)
            self.seen.note("slow reader", head)
            while await loop.sock_recv(sock, 256):
                await asyncio.sleep(1.0)
        finally:
            sock.close()

    async def _large_url(self) -> None:
        number = next(self._numbers)
        rate = LARGE_RATES[self._scene.arrive]
        await self._ask("large url", "large-url", self._picture(f"{self._scene.media}/large/{number}.bmp?rate={rate}"))

    async def _all_malformed(self, group: asyncio.TaskGroup) -> None:
        requests = self._scene.malformed
        begun = asyncio.get_running_loop().time()
        for index, raw in enumerate(requests):
            due = begun + self._scene.seconds * 0.95 * index / len(requests)
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            group.create_task(self._send("malformed", raw) if not self._scene.behave else self._talk("malformed"))

    # Those that behave.

    async def _behaving(self, kind: str) -> None:
        if kind == "slow reader":
            await self._ask(kind, "slow-reader", self._text(answer=400, stream=True))
        elif kind == "large url":
            await self._ask(kind, "large-url", self._picture(f"{self._scene.media}/small/{next(self._numbers)}.png"))
            await asyncio.sleep(8.0)
        else:
            await self._talk(kind)
            await asyncio.sleep(30.0 if kind == "silent" else 10.0)

    async def _talk(self, kind: str) -> None:
        await self._ask(kind, kind.replace(" ", "-"), self._text(answer=4, stream=False))

    # How.

    async def _ask(self, kind: str, tenant: str, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        await self._send(kind, self._head(tenant, len(raw)) + raw)

    async def _send(self, kind: str, raw: bytes) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(raw)
                    self.seen.note(kind, await reader.read())
                finally:
                    writer.close()
        except TimeoutError:
            self.seen.counts[kind, "hangs"] += 1
        except ConnectionError as error:
            self.seen.counts[kind, type(error).__name__] += 1

    def _head(self, tenant: str, length: int) -> bytes:
        return (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-tenant: {tenant}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        ).encode()

    def _text(self, *, answer: int, stream: bool) -> dict[str, Any]:
        prompt = f"{next(self._numbers)}: what a client may never do"
        messages = [{"role": "user", "content": prompt}]
        return {"model": self._scene.model, "messages": messages, "max_tokens": answer, "stream": stream}

    def _picture(self, url: str) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        return {"model": self._scene.model, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}


class CrowdProcess:
    """A crowd in a process of its own. Begins at once; `finish` waits for its end."""

    def __init__(self, scene: Scene, numbers: dict[str, int]) -> None:
        context = get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_main, args=(scene, numbers, there), daemon=True)
        self._process.start()
        there.close()
        assert self._here.poll(START_S) and self._here.recv() == "begun", "the crowd did not begin"
        self._limit_s = scene.seconds + START_S

    def finish(self) -> Seen:
        assert self._here.poll(self._limit_s), "the crowd did not end"
        seen: Seen = self._here.recv()
        self._process.join(START_S)
        return seen

    def stop(self) -> None:
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(START_S)


def _main(scene: Scene, numbers: dict[str, int], pipe: Connection) -> None:
    async def run() -> Seen:
        crowd = Crowd(scene)
        pipe.send("begun")
        return await crowd.run(numbers)

    pipe.send(asyncio.run(run()))
