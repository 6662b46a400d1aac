"""The cluster's API server, as the service account of a pod may ask it: list and watch, and patches.

Nothing is kept between two connections but what was seen: the token is rotated in its file, and so may be the
certificate of whoever signs. A watch goes on from the resource version it has got to; where the server refuses that
(410 Gone: its history begins later), all is listed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from deploy.host.environment import environment
from epd_serve.errors import ConfigError, EpdError
from store.addresses import authority

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where kubelet puts `token`, `ca.crt` and `namespace` of a pod's service account."""

WATCH_S, SLACK_S = 60.0, 15.0
"""How long the server is asked to keep a watch open, and how much longer it may be silent: then the connection is dead,
whatever TCP says."""

ANSWER_S, FIRST_S = 10.0, 60.0
"""For one answer, and for the first list."""

RETRY_S, RETRY_MAX_S, LIVED_S = 0.2, 15.0, 5.0
"""Before the same is tried again, twice as long each time; a watch that has lived so long was none that failed."""

GONE = 410

logger = logging.getLogger(__name__)
Object = dict[str, Any]
"""As the API server has it."""


class ApiError(EpdError):
    """The API server refuses. `code`: of HTTP."""

    def __init__(self, what: str, status: Object) -> None:
        self.answered = int(status.get("code", 0))
        super().__init__(f"{what}: {self.answered} {status.get('reason', '')} {status.get('message', '')}".rstrip())


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
            raise ConfigError(f"runtime kubernetes is for a pod with a service account: {error}") from error

    @classmethod
    def of_this_pod(cls, account: Path = ACCOUNT) -> ApiServer:
        """Raises ConfigError: this is no pod, or one without a service account."""
        host, port = (environment().get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
        if not (host and port.isdecimal()):
            raise ConfigError("runtime kubernetes is for a pod: KUBERNETES_SERVICE_HOST and _PORT say nothing here")
        return cls(f"https://{authority(host, int(port))}", account)

    async def follow(self, path: str, selector: str) -> AsyncIterator[dict[str, Object]]:
        """All objects of a collection with these labels, by name, at once and after each change. What the server does
        not say stays as it was. Raises EpdError: they cannot be listed a first time. A server that has just begun
        refuses what it allows a moment later (403): it has yet to read its roles."""
        objects: dict[str, Object] = {}
        version, seen, retry_s, since = "", False, RETRY_S, time.monotonic()
        while True:
            began, trouble = time.monotonic(), ""
            try:
                async with self._client() as http:
                    if not version:
                        found = _checked(await http.get(path, params={"labelSelector": selector}))
                        objects = {one["metadata"]["name"]: one for one in found["items"] or ()}
                        version, seen = found["metadata"]["resourceVersion"], True
                        yield dict(objects)
                    async with contextlib.aclosing(_events(http, path, selector, version)) as events:
                        async for kind, one in events:
                            version = one["metadata"]["resourceVersion"]
                            if kind == "BOOKMARK":
                                continue
                            objects.pop(one["metadata"]["name"], None)
                            if kind != "DELETED":
                                objects[one["metadata"]["name"]] = one
                            yield dict(objects)
            except ApiError as error:
                version, trouble = "", str(error) if error.answered != GONE else ""
            except EpdError as error:
                trouble = str(error)
            if not seen and time.monotonic() - since > FIRST_S:
                raise EpdError(trouble)
            if trouble:
                logger.warning("%s", trouble)
            retry_s = RETRY_S if time.monotonic() - began > LIVED_S else retry_s
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)

    async def rescale(self, path: str, wanted: Callable[[int], int]) -> tuple[int, int]:
        """Have something have so many replicas as follows from those that it has.

        Returns:
            How many it had, and has to have now.

        Raises:
            EpdError: it is refused, others have scaled it meanwhile, or there is no answer.
        """
        async with self._client() as http:
            scale = _checked(await http.get(f"{path}/scale"))
            had = int(scale["spec"].get("replicas", 0))
            if (count := wanted(had)) != had:
                seen = {"resourceVersion": scale["metadata"]["resourceVersion"]}
                await _patch(http, f"{path}/scale", {"metadata": seen, "spec": {"replicas": count}})
            return had, count

    async def annotate(self, path: str, annotations: Mapping[str, str | None]) -> None:
        """None: without it. Raises EpdError: it is refused, or there is no answer."""
        async with self._client() as http:
            await _patch(http, path, {"metadata": {"annotations": annotations}})

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        """With the token and the authority of now. Raises EpdError: the server does not answer as it should."""
        try:
            token = (self._account / "token").read_text("ascii").strip()
            verify = ssl.create_default_context(cafile=self._account / "ca.crt")
            headers = {"authorization": f"Bearer {token}", "accept": "application/json", "user-agent": "epd-serve"}
            async with httpx.AsyncClient(
                verify=verify, base_url=self._url, headers=headers, timeout=ANSWER_S, trust_env=False
            ) as http:
                yield http
        except (httpx.HTTPError, OSError, ValueError) as error:
            what = f"the API server at {self._url} does not answer"
            raise EpdError(f"{what}: {error or type(error).__name__}") from error


async def _events(
    http: httpx.AsyncClient, path: str, selector: str, version: str
) -> AsyncGenerator[tuple[str, Object]]:
    """What happens after this version: kind and object, until the server ends the watch. Raises ApiError: it cannot
    say that."""
    asked = {
        "watch": "1",
        "labelSelector": selector,
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": f"{WATCH_S:.0f}",
    }
    timeout = httpx.Timeout(ANSWER_S, read=WATCH_S + SLACK_S)
    async with http.stream("GET", path, params=asked, timeout=timeout) as answer:
        if answer.is_error:
            await answer.aread()
            _checked(answer)
        rest = b""
        async for chunk in answer.aiter_bytes():
            *lines, rest = (rest + chunk).split(b"\n")
            for event in map(json.loads, filter(None, lines)):
                if event["type"] == "ERROR":
                    raise ApiError(f"the watch of {path} has ended", event["object"])
                yield event["type"], event["object"]


async def _patch(http: httpx.AsyncClient, path: str, patch: Object) -> None:
    """Raises ApiError."""
    headers = {"content-type": "application/merge-patch+json"}
    _checked(await http.patch(path, content=json.dumps(patch), headers=headers))


def _checked(answer: httpx.Response) -> Object:
    """What it says. Raises ApiError."""
    told: Object = {"code": answer.status_code, "reason": answer.reason_phrase}
    with contextlib.suppress(ValueError):  # it is not the API server that refuses
        told = answer.json() | ({"code": answer.status_code} if answer.is_error else {})
    if answer.is_error:
        raise ApiError(f"{answer.request.method} {answer.request.url.path} is refused", told)
    return told
