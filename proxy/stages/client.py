"""HTTP to the stages: the connections kept to each, and the one place where failures of the network get our names.

Leaving a call early (cancellation, an error, a deadline) closes its connection, which is what makes vLLM abort the
request.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Any

from epd_serve import endpoint
from epd_serve.errors import DeadlineError, StageError
from epd_serve.instances import Instance
from proxy import strict_json
from proxy.config.limits import Timeouts
from proxy.errors import StageDied, StageUnreachable, stage_answer_error
from proxy.request.payload import Pieces
from proxy.stages.connection import Connection
from proxy.stages.sse import WholeEvents

REST_S = 0.1
"""For the end of a stream whose last event is there: servers send it apart."""
CONTENT_HEADERS = "content-type: application/json\r\naccept: */*\r\nuser-agent: epd-serve\r\n"


class StageClient:
    """Posts to stages. Every method raises only errors of `epd_serve.errors` (and CancelledError)."""

    def __init__(self, timeouts: Timeouts, *, key: str = "") -> None:
        """`key`: bearer token of the stages; "" where their sockets are in a private folder."""
        self._timeouts = timeouts
        self._always = CONTENT_HEADERS + (f"authorization: Bearer {key}\r\n" if key else "")
        self._idle: defaultdict[str, dict[Connection, None]] = defaultdict(dict)
        """By URL: unused connections, the one used last at the end."""

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
        decode: Callable[[bytes], Any] = strict_json.decode,
    ) -> dict[str, Any]:
        """The JSON answer of a non-streamed request.

        Args:
            timeout_s: None where the caller bounds the wait, as the exchange does for all of a request.
            decode: of JSON, an object in the end.

        Raises:
            StageRefusal: 4xx. StageError: 5xx, not JSON. StageDied: broken connection. StageUnreachable. DeadlineError.
        """
        if timeout_s is None:
            status, raw = await self._asked(instance, path, body, headers)
        else:
            async with deadline(timeout_s, f"stage {instance.id}"):
                status, raw = await self._asked(instance, path, body, headers)
        if status != 200:
            raise stage_answer_error(raw, stage=instance.id, status=status)
        try:
            answer = decode(raw)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise StageError(f"stage {instance.id} answered something that is no JSON object", stage=instance.id)
        return answer

    async def _asked(
        self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """The status and the body of an answer, once it is whole."""
        connection = await self._connection(instance)
        try:
            await connection.send(self._head(instance, path, body, headers), body)
            raw = await connection.whole()
            return connection.status, raw
        except ConnectionError as error:
            raise StageDied(f"stage {instance.id} broke its connection", stage=instance.id) from error
        finally:
            connection.leave(self._idle[instance.url].setdefault)

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
            raise StageDied(f"stage {instance.id} broke its connection", stage=instance.id) from error
        finally:
            connection.leave(self._idle[instance.url].setdefault, within_s=REST_S if whole.done else 0.0)

    def _head(self, instance: Instance, path: str, body: bytes | Pieces, headers: Mapping[str, str]) -> bytes:
        """Of a request. All headers are our own words, or a client's that a server has parsed: no line breaks."""
        more = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        return f"{_beginning(instance.url, path)}{self._always}{more}content-length: {len(body)}\r\n\r\n".encode()

    async def _connection(self, instance: Instance) -> Connection:
        """One that nobody uses, a new one where there is none. Raises StageUnreachable."""
        idle = self._idle[instance.url]
        while idle:
            connection, _ = idle.popitem()
            if connection.taken():
                return connection
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                return (await endpoint.connect(instance.url, partial(Connection, partial(self._lost, instance.url))))[1]
        except OSError as error:  # TimeoutError is one
            raise StageUnreachable(f"stage {instance.id} cannot be reached", stage=instance.id) from error

    def _lost(self, url: str, connection: Connection) -> None:
        self._idle[url].pop(connection, None)


@lru_cache(maxsize=1024)
def _beginning(url: str, path: str) -> str:
    """Of the head of a request."""
    address = endpoint.for_http(url)
    return f"POST {address.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {address.netloc}\r\n"


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Bound a wait and name it: DeadlineError when it ran out."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as late:
        if not scope.expired():
            raise
        raise DeadlineError(f"{what} took longer than {seconds:g} s") from late
