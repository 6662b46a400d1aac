"""HTTP to the stages: one connection pool per process, and the one place where httpx errors get our names.

Leaving a call early (cancellation, an error, a deadline) closes its connection, which is what makes vLLM abort the
request. The injectable transport is the test double.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import httpx

from epd_serve.errors import DeadlineError, StageError
from epd_serve.instances import Instance
from proxy.errors import StageUnreachable, stage_answer_error
from proxy.settings import Timeouts
from proxy.sse import EventSplitter

# vLLM's uvicorn closes idle connections after 5 s; reuse must stop well before, or a request meets the close.
KEEPALIVE_S = 2.0


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Bound a wait and name it: DeadlineError when it ran out."""
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError as error:
        if scope.expired():
            raise DeadlineError(f"{what} took longer than {seconds:g} s") from error
        raise


class StageClient:
    """Posts to stages. Every method raises only errors of `epd_serve.errors` (and CancelledError)."""

    def __init__(self, timeouts: Timeouts, *, key: str = "", transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`key`: bearer token of the stages; "" where they bind loopback and need none."""
        self._timeouts = timeouts
        # Deadlines of encode, first byte, idle and total are set around the calls; httpx bounds connecting.
        self._client = httpx.AsyncClient(
            transport=transport,
            headers={"authorization": f"Bearer {key}"} if key else None,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=timeouts.connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEPALIVE_S),
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def post(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float | None
    ) -> dict[str, Any]:
        """The JSON answer of a non-streamed request.

        Raises:
            StageRefusal: 4xx. StageError: 5xx, broken connection, not JSON. StageUnreachable. DeadlineError.
        """
        async with (
            deadline(self._timeouts.total_s if timeout_s is None else timeout_s, f"stage {instance.id}"),
            self._open(instance, path, body, headers) as response,
        ):
            with _named(instance):
                raw = await response.aread()
        try:
            answer = json.loads(raw)
        except ValueError as error:
            raise StageError(f"stage {instance.id} answered something that is not JSON", stage=instance.id) from error
        if not isinstance(answer, dict):
            raise StageError(f"stage {instance.id} answered JSON that is not an object", stage=instance.id)
        return answer

    async def events(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """The complete SSE events of a streamed request, byte for byte. Use under `contextlib.aclosing`.

        Raises:
            As `post`; DeadlineError when the first event or the next one is late.
        """
        splitter = EventSplitter()
        limit_s, awaited = self._timeouts.first_byte_s, "the first token"
        async with aclosing(self._chunks(instance, path, body, headers)) as chunks:
            while True:
                async with deadline(limit_s, f"{awaited} from stage {instance.id}"):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                for event in splitter.feed(chunk):
                    limit_s, awaited = self._timeouts.idle_s, "the next token"
                    yield event

    async def _chunks(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        async with self._open(instance, path, body, headers) as response:
            with _named(instance):
                async for chunk in response.aiter_raw():
                    yield chunk

    @asynccontextmanager
    async def _open(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        request = self._client.build_request(
            "POST", instance.url + path, content=body, headers={"content-type": "application/json", **headers}
        )
        with _named(instance):
            response = await self._client.send(request, stream=True)
        try:
            if response.status_code != 200:
                with _named(instance):
                    raw = await response.aread()
                raise stage_answer_error(raw, stage=instance.id, status=response.status_code)
            yield response
        finally:
            await response.aclose()


@contextmanager
def _named(instance: Instance) -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise StageUnreachable(f"stage {instance.id} cannot be reached", stage=instance.id) from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise StageError(
            f"stage {instance.id} broke its connection ({type(error).__name__})", stage=instance.id
        ) from error
