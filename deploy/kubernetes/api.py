"""The cluster's API server, as the service account of a pod may ask it: list and watch, and patches of a scale.

Nothing is kept between two connections but what was seen: the token is rotated in its file, and so may be the
certificate of whoever signs. A watch goes on from the resource version it has got to; where the server refuses that
(410 Gone: its history begins later), all is listed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import httpx
import msgspec

from deploy.host.environment import environment
from epd_serve.errors import ConfigError, EpdError
from store.addresses import authority

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where kubelet puts `token`, `ca.crt` and `namespace` of a pod's service account."""

WATCH_S, SLACK_S = 60.0, 15.0
"""How long the server is asked to keep a watch open, and how much longer it may be silent: then the connection is dead,
whatever TCP says."""

ANSWER_S, PATCH_S = 10.0, 20.0
"""For one answer, and for a patch until it is carried out."""

FIRST_S = 60.0
"""For the first list: whoever cannot have it says so, and does not serve."""

RETRY_S, RETRY_MAX_S, LIVED_S = 0.2, 15.0, 5.0
"""Before the same is tried again, twice as long each time; a watch that has lived so long was none that failed."""

PAGE = 500
GONE, CONFLICT = 410, 409

logger = logging.getLogger(__name__)


class Owner(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of every object."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[Owner, ...] = ()


class Replicas(msgspec.Struct, frozen=True):
    replicas: int = 0


class Scale(msgspec.Struct, frozen=True):
    """The subresource of what has replicas."""

    metadata: Metadata = Metadata()
    spec: Replicas = Replicas()


class Object(Protocol):
    @property
    def metadata(self) -> Metadata: ...


T = TypeVar("T", bound=Object)
R = TypeVar("R")


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct, Generic[T], frozen=True):
    metadata: _ListMeta
    items: tuple[T, ...] | None = None


class _Bookmark(msgspec.Struct, frozen=True):
    """What there is of an object that only says how far a watch has got."""

    metadata: Metadata


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    """What the API server says where it refuses."""

    code: int = 0
    reason: str = ""
    message: str = ""


class ApiError(EpdError):
    """The API server refuses. `status_code`: of HTTP. `retry_after_s`: when to ask again, if it says so."""

    def __init__(self, what: str, status: _Status, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{what}: {status.code} {status.reason} {status.message}".rstrip())
        self.status_code, self.retry_after_s = status.code, retry_after_s


class ApiServer:
    """Args:
        url: of the server.
        account: folder with `token`, `ca.crt` and `namespace`.

    Raises:
        ConfigError: there is no such account.
    """

    def __init__(self, url: str, account: Path = ACCOUNT) -> None:
        self._url = url
        self._account = account
        try:
            self.namespace = (account / "namespace").read_text("utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"--runtime kubernetes is for a pod with a service account: {error}", param="--runtime"
            ) from error

    @classmethod
    def of_this_pod(cls, account: Path = ACCOUNT) -> ApiServer:
        """Raises ConfigError: this is no pod, or one without a service account."""
        host, port = (environment().get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
        if not (host and port.isdecimal()):
            raise ConfigError(
                "--runtime kubernetes is for a pod: KUBERNETES_SERVICE_HOST and _PORT say nothing here",
                param="--runtime",
            )
        return cls(f"https://{authority(host, int(port))}", account)

    async def follow(self, path: str, selector: str, kind: type[T]) -> AsyncIterator[dict[str, T]]:
        """All objects, by name, at once and after each change. What the server does not say stays as it was.

        Args:
            path: of the collection. selector: of their labels.

        Raises:
            EpdError: they cannot be listed a first time.
        """
        objects: dict[str, T] = {}
        version, since = "", time.monotonic()
        seen, retry_s = False, RETRY_S
        while True:
            began = time.monotonic()
            try:
                async with self._client() as http:
                    if not version:
                        objects, version = await _listed(http, path, selector, kind)
                        seen = True
                        yield dict(objects)
                    async with contextlib.aclosing(_events(http, path, selector, version)) as events:
                        async for event in events:
                            version = _carry_out(event, objects, kind)
                            if event.type != "BOOKMARK":
                                yield dict(objects)
                trouble = ""
            except ApiError as error:
                version, trouble = "", str(error)
                if not seen and error.status_code in (401, 403, 404):
                    raise
                retry_s = max(retry_s, min(error.retry_after_s, RETRY_MAX_S))
                if error.status_code == GONE:
                    trouble = ""
            except (httpx.HTTPError, OSError, msgspec.MsgspecError) as error:
                trouble = f"the API server at {self._url} does not answer: {error or type(error).__name__}"
                version = "" if isinstance(error, msgspec.MsgspecError) else version
            if not seen and time.monotonic() - since > FIRST_S:
                raise EpdError(trouble)
            if trouble:
                logger.warning("%s", trouble)
            if time.monotonic() - began > LIVED_S:
                retry_s = RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)

    async def rescale(self, path: str, wanted: Callable[[int], int]) -> tuple[int, int]:
        """Have something have so many replicas as follows from those that it has.

        Returns:
            How many it had, and has to have now.

        Raises:
            EpdError: it is refused, or not carried out in time.
        """
        return await self._carried_out(f"{path}/scale", lambda http: _rescaled(http, f"{path}/scale", wanted))

    async def annotate(self, path: str, annotations: dict[str, str]) -> None:
        """Raises EpdError: it is refused, or not carried out in time."""
        await self._carried_out(path, lambda http: _patched(http, path, {"metadata": {"annotations": annotations}}))

    async def _carried_out(self, path: str, call: Callable[[httpx.AsyncClient], Awaitable[R]]) -> R:
        """Again while it may succeed. Raises EpdError."""
        retry_s, trouble = RETRY_S, ""
        try:
            async with asyncio.timeout(PATCH_S):
                while True:
                    try:
                        async with self._client() as http:
                            return await call(http)
                    except ApiError as error:
                        if error.status_code not in (CONFLICT, 401, 429) and error.status_code < 500:
                            raise
                        trouble = str(error)
                        retry_s = max(retry_s, error.retry_after_s)
                    except (httpx.HTTPError, OSError, msgspec.MsgspecError) as error:
                        trouble = f"{error or type(error).__name__}"
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, RETRY_MAX_S)
        except TimeoutError:
            raise EpdError(f"{path} is not patched: {trouble or 'the API server does not answer'}") from None

    def _client(self) -> httpx.AsyncClient:
        """With the token and the authority of now. Raises OSError."""
        token = (self._account / "token").read_text("ascii").strip()
        context = ssl.create_default_context(cafile=self._account / "ca.crt")
        return httpx.AsyncClient(
            verify=context,
            base_url=self._url,
            headers={"authorization": f"Bearer {token}", "accept": "application/json", "user-agent": "epd-serve"},
            timeout=ANSWER_S,
            trust_env=False,
        )


async def _listed(http: httpx.AsyncClient, path: str, selector: str, kind: type[T]) -> tuple[dict[str, T], str]:
    """All of them as they are now, by name, and of which version that is."""
    found: dict[str, T] = {}
    asked: dict[str, str | int] = {"labelSelector": selector, "limit": PAGE}
    while True:
        answer = await http.get(path, params=asked)
        _check(answer, f"{path} cannot be listed")
        page: _List[T] = msgspec.json.decode(answer.content, type=_List[kind])  # type: ignore[valid-type]
        found |= {one.metadata.name: one for one in page.items or ()}
        if not page.metadata.continue_:
            return found, page.metadata.resource_version
        asked["continue"] = page.metadata.continue_


async def _events(http: httpx.AsyncClient, path: str, selector: str, version: str) -> AsyncGenerator[_Event]:
    """What happens after this version, until the server ends the watch. Raises ApiError: it cannot say that."""
    asked: dict[str, str | int] = {
        "watch": "1",
        "labelSelector": selector,
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": round(WATCH_S),
    }
    timeout = httpx.Timeout(ANSWER_S, read=WATCH_S + SLACK_S)
    async with http.stream("GET", path, params=asked, timeout=timeout) as answer:
        if answer.is_error:
            await answer.aread()
            _check(answer, f"{path} cannot be watched")
        rest = b""
        async for chunk in answer.aiter_bytes():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in filter(None, lines):
                event = msgspec.json.decode(line, type=_Event)
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=_Status)
                    raise ApiError(f"the watch of {path} has ended", status)
                yield event


def _carry_out(event: _Event, objects: dict[str, T], kind: type[T]) -> str:
    """Have the objects be as after this. Returns the version of that."""
    if event.type == "BOOKMARK":
        return msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version
    one = msgspec.json.decode(event.object, type=kind)
    if event.type == "DELETED":
        objects.pop(one.metadata.name, None)
    else:
        objects[one.metadata.name] = one
    return one.metadata.resource_version


async def _rescaled(http: httpx.AsyncClient, path: str, wanted: Callable[[int], int]) -> tuple[int, int]:
    """Raises ApiError; of a conflict: somebody else has scaled it meanwhile."""
    answer = await http.get(path)
    _check(answer, f"{path} cannot be read")
    scale = msgspec.json.decode(answer.content, type=Scale)
    had, count = scale.spec.replicas, wanted(scale.spec.replicas)
    if count != had:
        seen = {"resourceVersion": scale.metadata.resource_version}
        await _patched(http, path, {"metadata": seen, "spec": {"replicas": count}})
    return had, count


async def _patched(http: httpx.AsyncClient, path: str, patch: dict[str, Any]) -> None:
    """Raises ApiError."""
    headers = {"content-type": "application/merge-patch+json"}
    answer = await http.patch(path, content=msgspec.json.encode(patch), headers=headers)
    _check(answer, f"{path} cannot be patched")


def _check(answer: httpx.Response, what: str) -> None:
    """Raises ApiError."""
    if answer.is_error:
        status = _Status(answer.status_code, answer.reason_phrase)
        with contextlib.suppress(msgspec.MsgspecError):
            said = msgspec.json.decode(answer.content, type=_Status)
            status = msgspec.structs.replace(said, code=answer.status_code)
        after = answer.headers.get("retry-after", "")
        raise ApiError(what, status, float(after) if after.isdecimal() else 0.0)
