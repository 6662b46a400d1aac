"""Who sees the status table, the metrics and the document: on the clients' port with its keys, or on one of its own."""

from __future__ import annotations

from typing import Any

import fastapi
import httpx
import jsonschema
import pytest

from epd_serve.roles import Role
from proxy.config.keys import ApiKeys
from proxy.http.admin import create_admin
from proxy.registry.table import InstanceTable
from tests.proxy.fakes import api_keys, cluster, document, settings
from tests.proxy.http.test_openapi import schema_of

TELLING = ("/instances", "/metrics", "/openapi.json", "/version")
KEY = {"authorization": "Bearer key"}


async def test_without_keys_and_without_an_admin_listener_all_is_open() -> None:
    async with cluster("PD0") as c:
        for path in TELLING:
            assert (await c.client.get(path)).status_code == 200, path


async def test_the_health_of_a_role_is_told_to_those_who_may_see_the_table() -> None:
    async with cluster("PD0", config=settings(api_keys=api_keys("key"))) as c:
        path = "/health?role=prefill-decode"
        assert (await c.client.get(path)).status_code == 401
        assert (await c.client.get(path, headers=KEY)).status_code == 200
    async with cluster("PD0", config=settings(observed=False)) as c:
        closed = await c.client.get(path)
        assert closed.status_code == 404 and "admin listener" in closed.json()["error"]["message"]


async def test_with_keys_nothing_is_told_to_those_who_have_none_but_health() -> None:
    async with cluster("PD0", config=settings(api_keys=api_keys("key"))) as c:
        for path in TELLING:
            assert (await c.client.get(path)).status_code == 401, path
            assert (await c.client.get(path, headers=KEY)).status_code == 200, path
        assert (await c.client.get("/health")).status_code == 200
        c.table.mark_down("PD0", "secret reason")


@pytest.mark.parametrize("more", [{"api_keys": api_keys("key")}, {"observed": False}])
async def test_where_the_table_is_closed_the_probes_tell_what_is_served_and_not_by_whom(more: dict[str, Any]) -> None:
    config = settings(modalities=frozenset({"image"}), **more)
    async with cluster("E0", "P0", "D0", wanted=(Role.E, Role.P, Role.D), config=config) as c:
        assert (await c.client.get("/ready")).json() == {
            "status": "ready", "kinds": {"text": {"served": True}, "image": {"served": True}}
        }  # fmt: skip
        c.table.mark_down("P0", "secret reason")
        unhealthy = await c.client.get("/health")
        assert (unhealthy.status_code, unhealthy.json()) == (503, {"status": "unavailable"})
        unready = await c.client.get("/ready", headers=KEY)
        jsonschema.validate(unready.json(), schema_of(document(config), "Ready"))
        assert unready.status_code == 503 and unready.json() == {
            "status": "unavailable", "kinds": {"text": {"served": False}, "image": {"served": False}}
        }  # fmt: skip


@pytest.mark.parametrize("keys", [None, api_keys("key")])
async def test_what_an_admin_listener_has_is_not_on_the_clients_port(keys: ApiKeys | None) -> None:
    async with cluster("PD0", config=settings(api_keys=keys, observed=False)) as c:
        for path in ("/instances", "/metrics"):
            assert (await c.client.get(path, headers=KEY)).status_code == 404, path
        document = (await c.client.get("/openapi.json", headers=KEY)).json()
        assert not {"/instances", "/metrics"} & document["paths"].keys()


async def counts() -> bytes:
    return b"counted 1.0\n"


async def test_an_admin_listener_wants_its_key_and_health_none() -> None:
    app = create_admin(InstanceTable(), counts, key="key")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        for path in ("/instances", "/metrics", "/openapi.json"):
            for wrong in ({}, {"authorization": "Bearer "}, {"authorization": "Bearer keys"}, {"authorization": "key"}):
                assert (await client.get(path, headers=wrong)).status_code == 401, path
            assert (await client.get(path, headers=KEY)).status_code == 200, path
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health?role=encode")).status_code == 401
        assert (await client.get("/health?role=encode", headers=KEY)).status_code == 404, "an empty table has no role"


async def test_an_admin_listener_without_a_key_asks_for_none_and_serves_no_model() -> None:
    app = create_admin(InstanceTable(), counts)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9000") as client:
        assert (await client.get("/metrics")).content == await counts()
        assert (await client.get("/instances")).json() == {"instances": []}
        for path in ("/v1/models", "/deployment", "/docs"):
            answer = await client.get(path)
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"


def changed_by(**more: Any) -> tuple[httpx.AsyncClient, list[str]]:
    """A client of an admin listener, and what was changed there."""
    changes: list[str] = []
    router = fastapi.APIRouter()

    @router.post("/deployment/layout")
    async def relayout() -> dict[str, str]:
        changes.append("layout")
        return {}

    app = create_admin(InstanceTable(), counts, more=[router], **more)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9000"), changes


async def test_without_a_key_nothing_is_changed_but_by_a_trusted_socket() -> None:
    client, changes = changed_by()
    async with client:
        refused = await client.post("/deployment/layout", json={"layout": "TP1"})
        assert refused.status_code == 401 and "--admin-key-file" in refused.json()["error"]["message"]
        assert (await client.get("/instances")).status_code == 200
    client, changed = changed_by(trusted=True)
    async with client:
        assert (await client.post("/deployment/layout", headers={"host": "deployment"})).status_code == 200
    assert (changes, changed) == ([], ["layout"])


@pytest.mark.parametrize("host", ["evil.example:9000", "127.0.0.1.evil.example", "", "evil.example"])
async def test_a_name_that_was_pointed_here_reads_nothing(host: str) -> None:
    """DNS rebinding: a page of evil.example, whose name is 127.0.0.1 by now, asks its own origin."""
    client, changes = changed_by()
    async with client:
        for path in ("/instances", "/metrics", "/health"):
            answer = await client.get(path, headers={"host": host})
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "wrong_origin", path
        about = {"host": host, "origin": f"http://{host}"}
        assert (await client.post("/deployment/layout", headers=about)).status_code == 403
    assert changes == []


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "localhost", "[::1]:9000"])
async def test_without_a_key_it_is_read_by_its_address(host: str) -> None:
    client, _ = changed_by()
    async with client:
        assert (await client.get("/metrics", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:8000"])
async def test_another_page_changes_nothing_though_it_had_the_key(origin: str) -> None:
    client, changes = changed_by(key="key")
    async with client:
        answer = await client.post("/deployment/layout", headers={**KEY, "origin": origin})
        assert answer.status_code == 403
        assert changes == []
        own = {**KEY, "host": "epd.example:9000", "origin": "https://epd.example:9000"}
        assert (await client.post("/deployment/layout", headers=own)).status_code == 200
    assert changes == ["layout"]
