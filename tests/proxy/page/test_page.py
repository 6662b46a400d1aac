"""The page's routes: its files for everybody, the rest for those who may; nothing of it from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from proxy.http.app import add_error_seam
from proxy.page.events import Seen, observed
from proxy.page.routes import STATIC, About, Page, files
from proxy.records.counts import Counts
from proxy.records.records import Question, RecordsAnswer
from proxy.registry.table import InstanceTable
from proxy.tenants import AuthenticationError
from tests.proxy.fakes import served

KEY = {"authorization": "Bearer key"}


async def observe(question: Question, whole: bool) -> Seen:
    listed = [] if question.id == "unknown" else [{"id": question.id or "r1", "tenant": question.tenant}]
    return Seen(RecordsAnswer(listed, Counts()), b'{"layout": "PD"}', b"[]")


def with_key(request: Request) -> str:
    if request.headers.get("authorization") != KEY["authorization"]:
        raise AuthenticationError("Missing or wrong key.")
    return "mine"


@asynccontextmanager
async def page(about: About | None = None, tenant: Any = lambda _: "") -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    add_error_seam(app)
    made = Page(about or About(), observe, tenant)
    app.include_router(made.router)
    async with served(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield client
        made.end()


async def test_its_files_are_for_everybody_and_say_that_nothing_is_fetched_from_elsewhere() -> None:
    async with page(About(key="api"), with_key) as client:
        for path in ("/", *(f"/page/{name}" for name in files())):
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await client.get("/page/about")).json()["key"] == "api"


@pytest.mark.parametrize("path", ["/page/events", "/page/requests", "/page/requests/r1", "/page/rates"])
async def test_what_it_shows_wants_the_key(path: str) -> None:
    async with page(About(key="api"), with_key) as client:
        refused = await client.get(path)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        async with client.stream("GET", path, headers=KEY) as answer:
            assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/page/events", "/page/requests", "/page/rates"])
async def test_what_an_admin_listener_shows_is_not_at_the_clients_port(path: str) -> None:
    async with page(About(observes=False)) as client:
        assert (await client.get(path)).status_code == 404
        assert (await client.get("/")).status_code == 200


@pytest.mark.parametrize("path", ["/page/../routes.py", "/page/%2e%2e/routes.py", "/page/nothing.js", "/page/samples/"])
async def test_no_other_file_is_given(path: str) -> None:
    async with page() as client:
        assert (await client.get(path)).status_code == 404


async def test_events_are_streamed() -> None:
    async with page() as client, client.stream("GET", "/page/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        while (await anext(lines)) != "event: deployment":
            pass
        assert json.loads((await anext(lines)).removeprefix("data: ")) == {"layout": "PD"}


async def test_requests_are_those_of_whoever_asks() -> None:
    async with page(About(key="api"), with_key) as client:
        listed = (await client.get("/page/requests?limit=3", headers=KEY)).json()["requests"]
        assert listed == [{"id": "r1", "tenant": "mine"}]
        one = (await client.get("/page/requests/r7", headers=KEY)).json()["request"]
        assert one == {"id": "r7", "tenant": "mine"}
        unknown = await client.get("/page/requests/unknown", headers=KEY)
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "unknown_request"
        wrong = await client.get("/page/requests?limit=0", headers=KEY)
        assert wrong.status_code == 400 and "limit" in wrong.json()["error"]["param"]


async def test_where_nobody_knows_of_a_deployment_its_instances_are_told() -> None:
    class Doors:
        table = InstanceTable()
        deployment = None

        async def look(self, question: Question) -> RecordsAnswer:
            return RecordsAnswer()

    seen = await observed(Doors())(Question(), True)
    assert (seen.deployment, seen.instances) == (b"null", b"[]")
    assert (await observed(Doors())(Question(), False)).deployment == b""


def test_nothing_in_its_files_names_another_origin() -> None:
    own = [path for path in STATIC.iterdir() if path.suffix in (".html", ".js", ".css") and "uPlot" not in path.name]
    assert len(own) >= 8
    for path in own:
        found = set(re.findall(r"\b(?:https?:)?//[\w.-]+\.\w+", path.read_text(encoding="utf-8")))
        assert found <= {"http://www.w3.org"}, path.name  # the name of SVG, which nobody fetches


def test_every_file_that_a_file_names_is_there() -> None:
    index = (STATIC / "index.html").read_text(encoding="utf-8")
    named = set(re.findall(r'(?:src|href)="page/([\w.]+)"', index))
    for path in STATIC.glob("*.js"):
        named |= set(re.findall(r'from "\./([\w.]+)"', path.read_text(encoding="utf-8")))
    assert {"main.js", "page.css", "uPlot.iife.min.js"} <= named <= files().keys()
