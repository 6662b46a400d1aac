"""The routes of the page: its files for everybody, what it shows for those who may see it.

The same at the clients' port and at the admin listener; what differs is `About`, and who may.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

import epd_serve
from epd_serve.errors import NotFoundError
from proxy.http.admin import request_routes
from proxy.page.events import Events
from proxy.page.observed import Observe
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


class File(NamedTuple):
    """`tag`: changes with its content, for HTTP's `ETag`."""

    content: bytes
    media_type: str
    tag: str


@functools.cache
def files() -> dict[str, File]:
    """By name: those of the page as they are called, pictures as `samples/NAME`. Read once."""
    there = {path.name: path for path in STATIC.iterdir()}
    there |= {f"samples/{path.name}": path for path in SAMPLES.iterdir()}
    return {name: _read(path) for name, path in sorted(there.items()) if path.suffix in TYPES}


def samples() -> list[str]:
    """Names of the demo's pictures, as of `files`."""
    return [name for name in files() if name.startswith("samples/")]


def _read(path: Path) -> File:
    content = path.read_bytes()
    return File(content, TYPES[path.suffix], f'"{xxhash.xxh3_64_hexdigest(content)}"')


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
        self._about = msgspec.json.encode(about)
        self._observe = observe
        self._tenant = tenant
        self._events = Events(observe)
        if about.observes:
            self._add_what_it_shows()
        self._add_files()

    def end(self) -> None:
        """Those who watch are told that it is over: no connection of theirs holds up the end of the server."""
        self._events.end()

    def _add_files(self) -> None:
        @self.router.get("/")
        async def index(request: Request) -> Response:
            return _answer(files()[INDEX], request)

        @self.router.get("/page/about")
        async def about() -> Response:
            return Response(self._about, media_type="application/json", headers=HEADERS)

        @self.router.get("/page/{name:path}")
        async def file(request: Request, name: str) -> Response:
            if name not in files():
                raise NotFoundError(f"There is no {request.method} {request.url.path}.", code="unknown_url")
            return _answer(files()[name], request)

    def _add_what_it_shows(self) -> None:
        async def look(question: Question) -> RecordsAnswer:
            return (await self._observe(question, False)).records

        @self.router.get("/page/events")
        async def events(request: Request) -> Response:
            tenant = self._tenant(request)
            self._events.check_room()
            return StreamingResponse(self._events.watch(tenant), media_type="text/event-stream", headers=HEADERS)

        self.router.include_router(request_routes(look, self._tenant), prefix="/page")


def _answer(file: File, request: Request) -> Response:
    headers = {**HEADERS, "etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
