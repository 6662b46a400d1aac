"""Who sees the status table, the metrics and the document: on the clients' port with its keys, or on one of its own."""

from __future__ import annotations

import httpx
import pytest

from proxy.admin import create_admin
from proxy.table import InstanceTable
from tests.proxy.fakes import cluster, settings

TELLING = ("/instances", "/metrics", "/openapi.json", "/version")
KEY = {"authorization": "Bearer key"}


async def test_without_keys_and_without_an_admin_listener_all_is_open() -> None:
    async with cluster("PD0") as c:
        for path in TELLING:
            assert (await c.client.get(path)).status_code == 200, path


async def test_with_keys_nothing_is_told_to_those_who_have_none_but_health() -> None:
    async with cluster("PD0", config=settings(api_keys=("key",))) as c:
        for path in TELLING:
            assert (await c.client.get(path)).status_code == 401, path
            assert (await c.client.get(path, headers=KEY)).status_code == 200, path
        assert (await c.client.get("/health")).status_code == 200
        c.table.mark_down("PD0", "secret reason")
        unhealthy = await c.client.get("/health")
        assert unhealthy.status_code == 503 and "secret reason" not in unhealthy.text
        unready = await c.client.get("/ready")
        assert unready.status_code == 503 and "PD0" not in unready.text and unready.json()["kinds"]["text"]["how"]


@pytest.mark.parametrize("keys", [(), ("key",)])
async def test_what_an_admin_listener_has_is_not_on_the_clients_port(keys: tuple[str, ...]) -> None:
    async with cluster("PD0", config=settings(api_keys=keys, observed=False)) as c:
        for path in ("/instances", "/metrics"):
            assert (await c.client.get(path, headers=KEY)).status_code == 404, path
        document = (await c.client.get("/openapi.json", headers=KEY)).json()
        assert not {"/instances", "/metrics"} & document["paths"].keys()


async def test_an_admin_listener_without_a_key_asks_for_none_and_serves_no_model() -> None:
    async def counts() -> bytes:
        return b"counted 1.0\n"

    app = create_admin(InstanceTable(), counts)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        assert (await client.get("/metrics")).content == await counts()
        assert (await client.get("/instances")).json() == {"instances": []}
        for path in ("/v1/models", "/openapi.json", "/docs", "/cluster/join"):
            answer = await client.get(path)
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"
