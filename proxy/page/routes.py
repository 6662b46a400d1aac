"""The routes of the page: its files for everybody, what it shows for those who may see it.

The same at the clients' port and at the admin listener; what differs is `About`, and who may.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

import epd_serve
from epd_serve.errors import NotFoundError
from proxy.http.admin import request_routes
from proxy.page.events import Events, Observe
from proxy.records.records import Question, RecordsAnswer

STATIC = Path(__file__).with_name("static")
SAMPLES = Path(epd_serve.__file__).with_name("demo") / "samples"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
INDEX = "index.html"


@functools.cache
def files() -> dict[str, Response]:
    """By name: those of the page as they are called, pictures as `samples/NAME`. Read once."""
    there = {path.name: path for path in STATIC.iterdir()}
    there |= {f"samples/{path.name}": path for path in SAMPLES.iterdir()}
    return {name: _file(path) for name, path in sorted(there.items()) if path.suffix in TYPES}


def _file(path: Path) -> Response:
    content = path.read_bytes()
    headers = {**HEADERS, "etag": f'"{xxhash.xxh3_64_hexdigest(content)}"'}
    return Response(content, media_type=TYPES[path.suffix], headers=headers)


def samples() -> list[str]:
    """Names of the demo's pictures, as of `files`."""
    return [name for name in files() if name.startswith("samples/")]


class About(msgspec.Struct, frozen=True):
    """What the page has to know before it asks for anything.

    Attributes:
        key: what is wanted of whoever sees the rest: `api` key, `admin` key, or nothing.
        observes: it shows the deployment here. changes: it can change it here, with the key.
        asks: models are asked here: there is a playground. clients_port: else, where they are, by HTTPS with
            `clients_tls`.
        samples: pictures of the demo, below `/page/`.
    """

    key: str = ""
    observes: bool = True
    changes: bool = False
    asks: bool = True
    clients_port: int | None = None
    clients_tls: bool = False
    samples: list[str] = msgspec.field(default_factory=samples)


class Page:
    """Args:
        about: what it is here.
        observe: asks for what it shows; not called where `about` says that it shows nothing.
        tenant: of a request, "" for whoever sees all; raises AuthenticationError.

    Attributes:
        router: its routes.
    """

    def __init__(self, about: About, observe: Observe, tenant: Callable[[Request], str]) -> None:
        self.router = APIRouter(include_in_schema=False)
        self._events = Events(observe)
        if about.observes:
            self._add_what_it_shows(observe, tenant)

        @self.router.get("/")
        async def index(request: Request) -> Response:
            return await file(request, INDEX)

        @self.router.get("/page/about")
        async def what_it_is() -> Response:
            return Response(msgspec.json.encode(about), media_type="application/json", headers=HEADERS)

        @self.router.get("/page/{name:path}")
        async def file(request: Request, name: str) -> Response:
            found = files().get(name)
            if found is None:
                raise NotFoundError(f"There is no {request.method} {request.url.path}.", code="unknown_url")
            if request.headers.get("if-none-match") == (tag := found.headers["etag"]):
                return Response(status_code=304, headers={**HEADERS, "etag": tag})
            return found

    def end(self) -> None:
        """Those who watch are told that it is over: no connection of theirs holds up the end of the server."""
        self._events.end()

    def _add_what_it_shows(self, observe: Observe, tenant: Callable[[Request], str]) -> None:
        async def look(question: Question) -> RecordsAnswer:
            return (await observe(question, False)).records

        @self.router.get("/page/events")
        async def events(request: Request) -> Response:
            whose = tenant(request)
            self._events.check_room()
            return StreamingResponse(self._events.watch(whose), media_type="text/event-stream", headers=HEADERS)

        self.router.include_router(request_routes(look, tenant), prefix="/page")
