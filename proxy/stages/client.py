"""HTTP to the stages: the connections kept to each, and the one place where failures of the network get our names.

Leaving a call early (cancellation, an error, a deadline) closes its connection, which is what makes vLLM abort the
request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from functools import lru_cache, partial
from types import TracebackType
from typing import Any

import msgspec

from epd_serve import endpoint
from epd_serve.errors import DeadlineError, StageError
from epd_serve.instances import KEEP_ALIVE_S, Instance
from proxy import strict_json
from proxy.config.limits import Timeouts
from proxy.errors import StageDied, StageUnreachable, stage_answer_error
from proxy.request.payload import Pieces
from proxy.stages.connection import Connection
from proxy.stages.sse import WholeEvents

IDLE_S = 0.8 * KEEP_ALIVE_S
"""An unused connection is used again for so long: well before the stage closes it, or a request meets the close."""
REST_S = 0.1
"""For the end of a stream whose last event is there: servers send it apart."""
CONTENT_HEADERS = "content-type: application/json\r\naccept: */*\r\nuser-agent: epd-serve\r\n"


class StageClient:
    """Posts to stages. Every method raises only errors of `epd_serve.errors` (and CancelledError)."""

    def __init__(self, timeouts: Timeouts, *, key: str = "") -> None:
        """`key`: bearer token of the stages; "" where their sockets are in a private folder."""
        self._timeouts = timeouts
        self._always = CONTENT_HEADERS + (f"authorization: Bearer {key}\r\n" if key else "")
        self._idle: dict[str, dict[Connection, float]] = {}
        """By URL: connections and since when they are unused, the one used last at the end."""

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in tuple(connections):
                connection.close()

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
        whole, begun = WholeEvents(), False
        connection = await self._connection(instance)
        try:
            connection.limit(self._timeouts.first_byte_s, f"the first token from stage {instance.id}")
            await connection.send(self._head(instance, path, body, headers), body)
            if await connection.head() != 200:
                raise stage_answer_error(await connection.whole(), stage=instance.id, status=connection.status)
            while not whole.done and (chunk := await connection.read()):
                if events := whole.feed(chunk):
                    if not begun:
                        begun = True
                        connection.limit(self._timeouts.idle_s, f"the next token from stage {instance.id}")
                    yield events
        except ConnectionError as error:
            raise _died(instance) from error
        finally:
            connection.leave(partial(self._put_back, instance.url), within_s=REST_S if whole.done else 0.0)

    async def _whole(
        self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str], timeout_s: float | None
    ) -> bytes:
        if timeout_s is not None:
            async with deadline(timeout_s, f"stage {instance.id}"):
                return await self._whole(instance, path, body, headers, None)
        connection = await self._connection(instance)
        try:
            await connection.send(self._head(instance, path, body, headers), body)
            raw = await connection.whole()
            if connection.status != 200:
                raise stage_answer_error(raw, stage=instance.id, status=connection.status)
            return raw
        except ConnectionError as error:
            raise _died(instance) from error
        finally:
            connection.leave(partial(self._put_back, instance.url), within_s=0.0)

    def _head(self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str]) -> bytes:
        """Of a request. All headers are our own words, or a client's that a server has parsed: no line breaks."""
        more = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        return f"{_beginning(instance.url, path)}{self._always}{more}content-length: {len(body)}\r\n\r\n".encode()

    async def _connection(self, instance: Instance) -> Connection:
        """One that nobody uses, a new one where there is none. Raises StageUnreachable."""
        idle = self._idle.get(instance.url)
        while idle:
            connection, since = idle.popitem()
            if connection.reusable and time.monotonic() < since + IDLE_S:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                made = partial(Connection, partial(self._lost, instance.url))
                return (await endpoint.connect(instance.url, made))[1]
        except OSError as error:  # TimeoutError is one
            raise StageUnreachable(f"stage {instance.id} cannot be reached", stage=instance.id) from error

    def _put_back(self, url: str, connection: Connection) -> None:
        if not connection.reusable:
            connection.close()
            return
        now = time.monotonic()
        idle = self._idle.setdefault(url, {})
        idle[connection] = now
        longest = next(iter(idle))
        if idle[longest] + IDLE_S < now:  # of a host that vanished nobody hears the end
            longest.close()

    def _lost(self, url: str, connection: Connection) -> None:
        if (idle := self._idle.get(url)) is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[url]


def _died(instance: Instance) -> StageDied:
    return StageDied(f"stage {instance.id} broke its connection", stage=instance.id)


@lru_cache(maxsize=1024)
def _beginning(url: str, path: str) -> str:
    """Of the head of a request."""
    address = endpoint.for_http(url)
    return f"POST {address.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {address.netloc}\r\n"


class deadline:
    """Bound a wait and name it: DeadlineError when it ran out."""

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._what = what

    async def __aenter__(self) -> None:
        self._scope = asyncio.timeout(self._seconds)
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise DeadlineError(f"{self._what} took longer than {self._seconds:g} s") from late
