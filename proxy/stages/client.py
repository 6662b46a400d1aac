"""HTTP to the stages: one connection pool per process, and the one place where aiohttp's errors get our names.

Leaving a call early (cancellation, an error, a deadline) closes its connection, which is what makes vLLM abort the
request. The injectable transport is the test double.
"""

from __future__ import annotations

import asyncio
import functools
import io
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Protocol

import aiohttp
import msgspec
from yarl import URL

from epd_serve.errors import StageError
from epd_serve.instances import Instance
from proxy import strict_json
from proxy.config.limits import Timeouts
from proxy.errors import StageDied, StageUnreachable, stage_answer_error
from proxy.request.payload import Pieces
from proxy.stages.deadlines import Content, ReadTimeouts, deadline
from proxy.stages.sse import WholeEvents

# vLLM's uvicorn closes idle connections after 5 s; reuse must stop well before, or a request meets the close.
KEEPALIVE_S = 2.0
# aiohttp writes bytes in one go, a file in pieces as the stage takes them.
ONE_GO_BYTES = 1 << 20
REST_S = 0.1
# All that aiohttp would add of its own, which costs it less than being told not to.
CONTENT_HEADERS = {
    "content-type": "application/json",
    "accept": "*/*",
    "accept-encoding": "identity",
    "user-agent": "epd-serve",
}


class Answer(Protocol):
    """An answer whose head has come: what is used of aiohttp's."""

    @property
    def status(self) -> int: ...
    @property
    def content(self) -> Content: ...
    async def read(self) -> bytes: ...
    def close(self) -> None:
        """Leave it: where its end has not come, its connection is closed."""


class Transport(Protocol):
    """The network towards the stages: what is used of `aiohttp.ClientSession`, and what a test replaces."""

    def post(self, url: URL, *, data: Any, headers: Mapping[str, str], allow_redirects: bool) -> Awaitable[Answer]: ...
    async def close(self) -> None: ...


class StageClient:
    """Posts to stages. Every method raises only errors of `epd_serve.errors` (and CancelledError)."""

    def __init__(self, timeouts: Timeouts, *, key: str = "", transport: Transport | None = None) -> None:
        """`key`: bearer token of the stages; "" where they bind loopback and need none."""
        self._timeouts = timeouts
        self._headers = {**CONTENT_HEADERS, **({"authorization": f"Bearer {key}"} if key else {})}
        self._injected = transport
        self._opened: Transport | None = None

    async def aclose(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def post(
        self,
        instance: Instance,
        path: str,
        body: bytes | Pieces,
        headers: Mapping[str, str],
        *,
        timeout_s: float | None,
    ) -> dict[str, Any]:
        """The JSON answer of a non-streamed request. Without `timeout_s` the caller bounds the wait, as the exchange
        does for all of a request.

        Raises:
            StageRefusal: 4xx. StageError: 5xx, not JSON. StageDied: broken connection. StageUnreachable. DeadlineError.
        """
        raw = await self._whole(instance, path, body, headers, timeout_s)
        try:
            answer = strict_json.decode(raw)
        except (ValueError, RecursionError) as error:
            raise StageError(f"stage {instance.id} answered something that is not JSON", stage=instance.id) from error
        if not isinstance(answer, dict):
            raise StageError(f"stage {instance.id} answered JSON that is not an object", stage=instance.id)
        return answer

    async def fields(
        self,
        instance: Instance,
        path: str,
        body: bytes | Pieces,
        headers: Mapping[str, str],
        *,
        timeout_s: float | None,
    ) -> Mapping[str, msgspec.Raw]:
        """Does as `post` for an answer that is only passed on. Returns its fields, each as the bytes that the stage
        sent."""
        raw = await self._whole(instance, path, body, headers, timeout_s)
        try:
            return strict_json.fields(raw)
        except (ValueError, RecursionError) as error:
            raise StageError(
                f"stage {instance.id} answered something that is no JSON object", stage=instance.id
            ) from error

    async def events(
        self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """The SSE events of a streamed request, byte for byte, as many at a time as have come whole. Use under
        `contextlib.aclosing`.

        Raises:
            As `post`; DeadlineError when the first event or the next one is late.
        """
        whole = WholeEvents()
        async with self._open(instance, path, body, headers, self._timeouts.first_byte_s) as answer:
            first = f"the first token from stage {instance.id}"
            reads = ReadTimeouts(answer.content, answer.close, self._timeouts.first_byte_s, first)
            try:
                while True:
                    with _named(instance, reads):
                        chunk = await reads.readany()
                    if not chunk:
                        return
                    if events := whole.feed(chunk):
                        reads.becomes(self._timeouts.idle_s, f"the next token from stage {instance.id}")
                        yield events
            finally:
                reads.end()
                if whole.done and not answer.content.at_eof():
                    await _rest(answer.content)

    async def _whole(
        self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str], timeout_s: float | None
    ) -> bytes:
        if timeout_s is not None:
            async with deadline(timeout_s, f"stage {instance.id}"):
                return await self._whole(instance, path, body, headers, None)
        answer = await self._send(instance, path, body, headers)
        try:
            with _named(instance):
                raw = await answer.read()
            if answer.status != 200:
                raise stage_answer_error(raw, stage=instance.id, status=answer.status)
            return raw
        finally:
            answer.close()

    @asynccontextmanager
    async def _open(
        self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str], limit_s: float
    ) -> AsyncIterator[Answer]:
        """An answer with status 200 whose body is still to come; `limit_s` bounds the wait for its head."""
        answer: Answer | None = None
        try:
            async with deadline(limit_s, f"the first token from stage {instance.id}"):
                answer = await self._send(instance, path, body, headers)
                if answer.status != 200:
                    with _named(instance):
                        raw = await answer.read()
                    raise stage_answer_error(raw, stage=instance.id, status=answer.status)
            yield answer
        finally:
            if answer is not None:
                answer.close()

    async def _send(self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str]) -> Answer:
        if self._opened is None:  # not before there is an event loop
            self._opened = self._injected or _session(self._timeouts.connect_s)
        data = io.BytesIO(body) if isinstance(body, bytes) and len(body) > ONE_GO_BYTES else body
        with _named(instance):
            return await self._opened.post(
                _url(instance.url, path), data=data, headers={**self._headers, **headers}, allow_redirects=False
            )


def _session(connect_s: float) -> Transport:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        # Deadlines of encode, first byte, idle and total are set around the calls; aiohttp bounds connecting.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


async def _rest(content: Content) -> None:
    """Take the end of a body whose last event is there: servers send it apart, and without it no connection is used
    again."""
    with suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(REST_S):
            await content.readany()


@functools.lru_cache(maxsize=1024)
def _url(base: str, path: str) -> URL:
    return URL(base + path)


class _named:
    """Gives the transport's errors our names, within its context. Entered several times per request."""

    __slots__ = ("_instance", "_reads")

    def __init__(self, instance: Instance, reads: ReadTimeouts | None = None) -> None:
        self._instance = instance
        self._reads = reads

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        name = self._instance.id
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            raise StageUnreachable(f"stage {name} cannot be reached", stage=name) from error
        if isinstance(error, aiohttp.ClientError | OSError):
            if self._reads is not None and self._reads.late is not None:
                raise self._reads.late from error
            raise StageDied(f"stage {name} broke its connection ({type(error).__name__})", stage=name) from error
