"""Tenants: who one is, and that nobody gets at what another one sent."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
from msgspec import structs
from starlette.datastructures import Headers

from epd_serve.errors import ConfigError, EpdError, RequestError
from proxy.config.keys import ApiKeys, tenant_digest
from proxy.config.limits import KeyLimits
from proxy.config.settings import ProxySettings
from proxy.request.parse import Endpoint
from proxy.tenants import DEFAULT_TENANT, AuthenticationError, Callers, MemoryReservation
from proxy.workers.wire import share_of
from store.keys import tenant_of
from tests.proxy.fakes import Cluster, api_keys, cluster, encodes, hangs, image_body, settings, text_body

CHAT = Endpoint.CHAT.value
KEY_NAMES = ("one", "two")
KEYS = settings(api_keys=api_keys(*KEY_NAMES))
NAMED = settings(tenant_header="X-Tenant")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def tenant(config: ProxySettings, **headers: str) -> str:
    return Callers(config).tenant_of(Headers({name.replace("_", "-"): value for name, value in headers.items()}))


def test_a_tenant_follows_from_the_key_or_from_the_configured_header() -> None:
    assert tenant(settings(), x_tenant="a") == DEFAULT_TENANT, "a header that is not configured is not heeded"
    assert tenant(NAMED) == tenant(NAMED, x_tenant="") == DEFAULT_TENANT
    assert tenant(NAMED, x_tenant="a") == tenant(NAMED, X_TENANT=" a ") != tenant(NAMED, x_tenant="b")
    assert "a" * 8 not in tenant(NAMED, x_tenant="a" * 8), "its value is digested"
    assert tenant(KEYS, **bearer("one")) != tenant(KEYS, **bearer("two"))


def test_no_client_can_name_itself_into_the_tenant_of_another_key() -> None:
    both = settings(api_keys=api_keys("one", "two"), tenant_header="X-Tenant")
    tenants = {tenant(both, **bearer(key), **named) for key in ("one", "two") for named in ({}, {"x_tenant": "a"})}
    assert len(tenants) == 4
    with pytest.raises(AuthenticationError):
        tenant(both, x_tenant="a")


def test_keys_of_one_tenant_are_one_tenant_and_two_accounts() -> None:
    one, two = api_keys("one", "two").keys
    callers = Callers(KEYS)
    callers.go_by(ApiKeys(api_keys().salt, (one, structs.replace(two, tenant="one"))))
    first, second = (callers.caller_of(Headers(bearer(key))) for key in ("one", "two"))
    assert first.tenant == second.tenant == tenant_digest("one") and first.account != second.account


@pytest.mark.parametrize(
    "authorization", ["", "one", "Basic one", "Bearer", "Bearer ", "Bearer ONE", "Bearer one two", "Bearer \xff"]
)
def test_whoever_bears_no_key_is_refused(authorization: str) -> None:
    with pytest.raises(AuthenticationError):
        Callers(KEYS).caller_of(Headers({"authorization": authorization}))


async def test_keys_change_while_requests_run() -> None:
    async with cluster("PD0", config=settings(api_keys=api_keys("one"))) as c:
        c["PD0"].script.append(hangs)
        running = asyncio.create_task(c.client.post(CHAT, json=text_body(), headers=bearer("one")))
        await c["PD0"].until(lambda stage: stage.active == 1)
        c.pipeline.callers.go_by(api_keys("two"))
        codes = [(await c.client.post(CHAT, json=text_body(), headers=bearer(key))).status_code for key in KEY_NAMES]
        assert codes == [401, 200] and not running.done()
        running.cancel()
        await c.idle()


def test_a_key_s_limits_are_shared_by_the_processes_that_count_for_themselves() -> None:
    keys = api_keys("one", requests_in_flight=5)
    shared = share_of(settings(api_keys=keys, key_limits=KeyLimits(requests_per_minute=8)), 4)
    assert Callers(shared).caller_of(Headers(bearer("one"))).limits == KeyLimits(2, 2)


def test_a_tenant_header_sent_twice_is_refused() -> None:
    twice = Headers(raw=[(b"x-tenant", b"mine"), (b"x-tenant", b"theirs")])
    with pytest.raises(RequestError, match="once"):
        Callers(NAMED).tenant_of(twice)


def test_a_tenant_header_must_be_a_header_name() -> None:
    with pytest.raises(ConfigError, match="tenant_header"):
        settings(tenant_header="X Tenant:")


@pytest.mark.parametrize(
    ("config", "accounts"),
    [
        (settings(), False),
        (settings(api_keys=api_keys("one")), True),  # there can be another one at any time
        (KEYS, True),
        (NAMED, True),
    ],
)
async def test_only_where_there_can_be_several_accounts_is_anything_kept_for_others(
    config: ProxySettings, accounts: bool
) -> None:
    async with cluster("PD0", config=config) as c:
        assert c.pipeline.arriving.most == c.pipeline.arriving.limit // (2 if accounts else 1)
        with MemoryReservation(c.pipeline.memory, "a") as held:
            held.take(config.memory.process_bytes // 2)
            with pytest.raises(EpdError) if accounts else nullcontext():
                held.take(config.memory.process_bytes // 2)


async def test_two_keys_are_served_where_one_body_may_arrive_at_a_time() -> None:
    async with cluster("PD0", config=settings(api_keys=api_keys("one", "two"), max_in_flight=3)) as c:
        for key in ("one", "two"):
            assert (await c.client.post(CHAT, json=text_body(), headers=bearer(key))).status_code == 200


async def test_tenants_get_their_own_keys_and_salt() -> None:
    async with cluster("E0", "PD0", config=KEYS) as c:
        for key in ("one", "two", "one"):
            assert (await c.ask(headers=bearer(key))).status_code == 200
        keys, salts = c["E0"].keys, [call.body["cache_salt"] for call in c["PD0"].calls]
        assert keys[0] == keys[2] != keys[1] and salts[0] == salts[2] != salts[1]
        assert tenant_of(keys[0][0]) != tenant_of(keys[1][0]), "each takes room of a share of its own"
        assert [call.body["cache_salt"] for call in c["E0"].calls] == salts
        assert (await c.client.post(CHAT, json=text_body())).status_code == 401
        assert (await c.client.get("/v1/models")).status_code == 401


async def probe(c: Cluster) -> list[list[str]]:
    """Ask for the same image as a and as b at once, then as b again. Returns the items that E was asked for."""
    c["E0"].usual = encodes()
    for name in ("a", "b", "b"):
        assert (await c.client.post(CHAT, json=image_body(), headers={"x-tenant": name})).status_code == 200
    return c["E0"].keys


async def test_a_probe_from_another_tenant_never_hits_and_ones_own_does() -> None:
    async with cluster("E0", "PD0", config=NAMED) as c:
        [of_a], [of_b] = await probe(c)
        assert of_a != of_b
        assert c.metric("epd_proxy_encode_skipped_total") == 1


async def test_shared_features_are_shared_but_prefix_caches_are_not() -> None:
    async with cluster("E0", "PD0", config=settings(tenant_header="x-tenant", shared_features=True)) as c:
        assert len(await probe(c)) == 1
        salts = [call.body["cache_salt"] for call in c["PD0"].calls]
        assert salts[0] != salts[1] == salts[2]


@pytest.mark.parametrize(("key", "heard"), [("the-stages-key", "Bearer the-stages-key"), ("", None)])
async def test_stages_hear_their_own_key_and_never_the_clients(key: str, heard: str | None) -> None:
    async with cluster("E0", "PD0", config=settings(stage_key=key, api_keys=api_keys("client"))) as c:
        assert (await c.ask(headers=bearer("client"))).status_code == 200
        for stage in ("E0", "PD0"):
            assert [call.headers.get("authorization") for call in c[stage].calls] == [heard]
