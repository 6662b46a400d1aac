"""A joined stage's calls to its head. The one place where their HTTP becomes our errors."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

import httpx
import msgspec

from deploy.alone.stages import is_http_address
from epd_serve.cluster import (
    BEAT,
    JOIN,
    LEAVE,
    Beat,
    JoinAnswer,
    JoinRefusedError,
    JoinRequest,
    Leave,
    Left,
    NotAMemberError,
)
from epd_serve.errors import ConfigError, EpdError

TIMEOUT_S = 5.0
BEAT_TIMEOUT_S = 2.0
Answer = TypeVar("Answer")


class HeadAwayError(EpdError):
    """Nobody answers at the head's address, or it is in no state to. Trying again helps."""

    status = 503
    code = "head_away"
    retryable = True


class HeadClient:
    """Calls to one head, as an async context manager. `transport` is the seam for tests.

    Raises:
        ConfigError: `url` is not http://HOST:PORT.
    """

    def __init__(self, url: str, cluster_key: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        check_head_url(url)
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {cluster_key}"},
            transport=transport,
            trust_env=False,
            timeout=TIMEOUT_S,
        )

    async def __aenter__(self) -> HeadClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def join(self, request: JoinRequest) -> JoinAnswer:
        """Raises HeadAwayError; JoinRefusedError when trying again is useless."""
        return _decoded(await self._post(JOIN, request, TIMEOUT_S), JoinAnswer)

    async def beat(self, beat: Beat) -> None:
        """Raises HeadAwayError, NotAMemberError, JoinRefusedError (another key by now)."""
        await self._post(BEAT, beat, BEAT_TIMEOUT_S)

    async def leave(self, leave: Leave) -> bool:
        """Whether everything in flight ended. Raises as `beat`."""
        return _decoded(await self._post(LEAVE, leave, leave.drain_s + TIMEOUT_S), Left).drained

    async def _post(self, path: str, message: msgspec.Struct, timeout_s: float) -> bytes:
        try:
            response = await self._client.post(
                path,
                content=msgspec.json.encode(message),
                headers={"content-type": "application/json"},
                timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, TIMEOUT_S)),
            )
        except httpx.HTTPError as error:
            raise HeadAwayError(f"no answer from {self.url} ({str(error) or type(error).__name__})") from error
        if response.status_code < 300:
            return response.content
        raise self._refusal(response)

    def _refusal(self, response: httpx.Response) -> EpdError:
        code, said = _error(response)
        if response.status_code >= 500:
            return HeadAwayError(f"{self.url} answers {response.status_code}: {said}")
        if code == NotAMemberError.code:
            return NotAMemberError(said)
        if code == "wrong_cluster_key":
            return JoinRefusedError(f"{self.url} has another cluster key than --cluster-key-file", code=code)
        if response.status_code in (404, 405):
            return JoinRefusedError(f"{self.url} takes no stages: give the address that the head says they join it at")
        return JoinRefusedError(f"{self.url} refuses: {said}", code=code)


def check_head_url(url: str) -> None:
    """Raises ConfigError when it is not http://HOST:PORT."""
    if not is_http_address(url):
        raise ConfigError(f"--join {url!r} is not http://HOST:PORT of the head's admin port", param="--join")


def _error(response: httpx.Response) -> tuple[str | None, str]:
    """(code, message) of an error answer, whoever wrote it."""
    try:
        error: Any = response.json()["error"]
        return error.get("code"), str(error.get("message"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, response.text[:200]


def _decoded(raw: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise HeadAwayError(f"the head's answer is not a {kind.__name__}: {error}") from error
