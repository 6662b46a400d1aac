"""Who may be a member of a cluster, under which name, and what becomes of members that fall silent."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from epd_serve.cluster import (
    Beat,
    ClusterSettings,
    JoinAnswer,
    JoinRefusedError,
    JoinRequest,
    Leave,
    NotAMemberError,
)
from epd_serve.roles import Role
from epd_serve.wire import KvLink, KvReport
from proxy.cluster.compatibility import ClusterIdentity
from proxy.cluster.membership import FORGET_S, Membership
from proxy.http.admin import create_admin
from proxy.http.app import create_app
from proxy.registry.instance_state import Work
from proxy.registry.table import InstanceTable
from tests.proxy.fakes import cluster as fake_stages
from tests.proxy.fakes import data_url, image_body, image_file, settings
from tests.waiting import PATIENCE_S

KEY = "a-cluster-key-of-some-length"
VERSIONS = {"epd-serve": "1", "vllm": "0.32.0", "device": "cpu"}
SETTINGS = ClusterSettings("demo", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "127.0.0.1:3")


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


class Cluster:
    """A membership with a clock in hand."""

    def __init__(self, **identity: Any) -> None:
        self.clock = Clock()
        self.table = InstanceTable()
        facts = {
            "model": "m",
            "revision": "r1",
            "processing": "",
            "multimodal": True,
            "version": "1",
            **identity,
        }
        self.members = Membership(self.table, ClusterIdentity(**facts), SETTINGS, now=self.clock)

    def join(self, role: Role = Role.P, number: int = 0, **fields: Any) -> JoinAnswer:
        return self.members.join(asks(role, number, **fields))

    def beat(self, name: str, agent: str, number: int = 1, incarnation: str = "one", up: bool = True) -> None:
        self.members.beat(Beat(name, agent, number, incarnation, up, "" if up else "killed"))

    def up(self) -> dict[str, bool]:
        return {view.instance.id: view.up for view in self.table.snapshot()}


def asks(role: Role = Role.P, number: int = 0, **fields: Any) -> JoinRequest:
    host = f"127.0.0.{number + 3}"
    known = {
        "agent": f"agent-{role}-{number}",
        "host": host,
        "url": f"http://{host}:8001",
        "model": "m",
        "revision": "r1",
        "versions": VERSIONS,
        "kv_endpoint": f"tcp://{host}:8002" if role.sends_kv else "",
        "kv_workers": f"tcp://{host}:8002+{{rank}}" if role.takes_kv else "",
    }
    return JoinRequest(role=role, **{**known, **fields})


# --- joining and names ------------------------------------------------------------------------------------------------


def test_a_stage_that_joins_is_known_and_down_until_its_first_beat() -> None:
    cluster = Cluster()
    assert cluster.join() == JoinAnswer("P0", SETTINGS, [])
    assert cluster.up() == {"P0": False}
    cluster.beat("P0", "agent-P-0", incarnation="one")
    instance = cluster.table.instance("P0")
    assert cluster.up() == {"P0": True}
    assert (instance.incarnation, instance.kv_endpoint) == ("one", "tcp://127.0.0.3:8002")
    assert instance.events == SETTINGS.events_listen
    assert (instance.kv_news, instance.kv_workers) == ((SETTINGS.events_listen,), ())
    assert instance.load_news == SETTINGS.events_listen


def test_names_are_the_role_and_the_next_free_number() -> None:
    cluster = Cluster()
    assert [cluster.join(Role.P, number).id for number in range(3)] == ["P0", "P1", "P2"]
    assert cluster.join(Role.D, 9).id == "D0"
    asyncio.run(cluster.members.leave(Leave("P1", "agent-P-1", 0)))
    assert cluster.join(Role.P, 7).id == "P1"


async def test_a_member_that_comes_again_serves_once_the_links_to_it_are_up() -> None:
    cluster = Cluster()
    cluster.join(Role.D, 1)
    cluster.join(Role.P, 0)
    cluster.beat("D0", "agent-D-1")
    cluster.beat("P0", "agent-P-0")
    for state, up in (("opening", False), ("up", True)):
        link = KvLink("tcp://127.0.0.4:8002", 0, state)
        cluster.table.report_kv(KvReport("P0", "one", 0, "adaptive", 0.0, [link]))
        cluster.beat("P0", "agent-P-0", number=2)
        assert cluster.up() == {"D0": True, "P0": up}


def test_every_rank_of_a_member_has_an_address() -> None:
    cluster = Cluster()
    cluster.join(Role.P, 1, tp=2)
    cluster.join(Role.D, 2, tp=2)
    assert cluster.table.instance("P0").kv_news == (SETTINGS.events_listen,) * 2
    assert cluster.table.instance("D0").kv_workers == ("tcp://127.0.0.5:8002", "tcp://127.0.0.5:8003")


def test_a_prefill_stage_is_told_the_data_channels_of_the_decoders_that_are_here() -> None:
    cluster = Cluster()
    cluster.join(Role.D, 1)
    cluster.join(Role.D, 2, tp=2)
    assert cluster.join(Role.P).kv_peers == [
        ("tcp://127.0.0.4:8002",),
        ("tcp://127.0.0.5:8002", "tcp://127.0.0.5:8003"),
    ]


def test_an_agent_that_joins_again_keeps_its_name_and_so_does_its_successor_at_the_same_address() -> None:
    cluster = Cluster()
    cluster.join(Role.P, 0)
    cluster.join(Role.P, 1)
    assert cluster.join(Role.P, 1, instance="P1").id == "P1"
    assert cluster.join(Role.P, 1, agent="after a crash").id == "P1"
    with pytest.raises(NotAMemberError, match="join again"):
        cluster.beat("P1", "agent-P-1")


def test_an_address_belongs_to_who_joined_last_whatever_its_role() -> None:
    cluster = Cluster()
    cluster.join(Role.E, 0)
    assert cluster.join(Role.P, 0).id == "P0"
    assert list(cluster.up()) == ["P0"], "the encoder that was there cannot listen there any more"


def test_a_name_that_the_operator_chose_is_given_or_refused_never_replaced() -> None:
    cluster = Cluster()
    cluster.join(Role.P, 0)
    cluster.beat("P0", "agent-P-0")
    with pytest.raises(JoinRefusedError, match="P0 belongs to the stage at http") as refused:
        cluster.join(Role.P, 1, instance="P0", instance_fixed=True)
    assert refused.value.code == "name_taken"
    assert cluster.join(Role.P, 1, instance="P0").id == "P1", "a name that it merely had before is not insisted on"
    assert cluster.join(Role.P, 2, instance="left", instance_fixed=True).id == "left"


def test_after_the_head_was_restarted_a_running_stage_has_its_name_and_incarnation_again() -> None:
    cluster = Cluster()
    assert cluster.join(Role.P, 5, instance="P3", incarnation="alive").id == "P3"
    cluster.beat("P3", "agent-P-5", number=912, incarnation="alive")
    assert cluster.up() == {"P3": True}
    assert cluster.table.instance("P3").incarnation == "alive"


# --- what must agree --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"revision": "r2"}, "model_differs", "revision r1, this stage m revision r2"),
        ({"revision": "", "model": "other"}, "model_differs", "the head serves m, this stage other"),
        ({"processing": "--dtype float32"}, "processing_differs", "the head has none, this stage --dtype float32"),
        ({"versions": {**VERSIONS, "epd-serve": "2"}}, "version_differs", "the head has 1, this stage 2"),
        ({"versions": {**VERSIONS, "vllm": "0.33.0"}}, "version_differs", "D0 has 0.32.0, this stage 0.33.0"),
        ({"versions": {**VERSIONS, "device": "npu"}}, "device_differs", "D0 has cpu, this stage npu"),
        ({"url": "https://h:1"}, "bad_address", "http://HOST:PORT"),
        ({"url": "http://[::1"}, "bad_address", "http://HOST:PORT of 127.0.0.3"),
        ({"url": "http://127.0.0.3:70000"}, "bad_address", "http://HOST:PORT of 127.0.0.3"),
        ({"url": "http://169.254.169.254:80"}, "bad_address", "http://HOST:PORT of 127.0.0.3"),
        ({"url": "http://127.0.0.3:8001?x"}, "bad_address", "http://HOST:PORT of 127.0.0.3"),
        ({"kv_endpoint": "ipc:///tmp/x"}, "bad_address", "kv_endpoint 'ipc:///tmp/x' is not tcp://HOST:PORT"),
        ({"kv_workers": "tcp://10.0.0.1:2"}, "bad_address", "kv_workers"),
        ({"host": "0.0.0.0"}, "bad_address", "no machine's address"),
        ({"host": "somewhere"}, "bad_address", "no IPv4 address"),
        ({"instance": "../../etc/x"}, "bad_name", "letters, digits"),
        ({"instance": 'a"} 1\nb{c="'}, "bad_name", "letters, digits"),
        ({"incarnation": "x" * 65}, "bad_name", "incarnation"),
        ({"tp": 10**5000}, "bad_width", "no place to run"),
        ({"tp": 0}, "bad_width", "no place to run"),
        ({"devices": [10**5000]}, "bad_width", "no place to run"),
        ({"devices": [-1]}, "bad_width", "no place to run"),
    ],
)
def test_a_stage_that_differs_is_refused_and_told_in_what(fields: dict[str, Any], code: str, reason: str) -> None:
    cluster = Cluster()
    cluster.join(Role.D, 1)
    with pytest.raises(JoinRefusedError) as refused:
        cluster.join(Role.P, 0, **fields)
    assert refused.value.code == code
    assert reason in refused.value.message
    assert list(cluster.up()) == ["D0"]


def test_a_stage_of_another_machine_that_gives_its_loopback_address_is_refused() -> None:
    cluster = Cluster()
    assert cluster.members.join(asks(), "127.0.0.1").id == "P0"
    with pytest.raises(JoinRefusedError, match="this stage is at 10\\.0\\.0\\.7 but says --host 127"):
        cluster.members.join(asks(), "10.0.0.7")
    away = asks(host="10.0.0.7", url="http://10.0.0.7:8001", kv_endpoint="tcp://10.0.0.7:8002")
    assert cluster.members.join(away, "10.0.0.7").id == "P1"


def test_roles_that_cannot_serve_are_refused() -> None:
    with pytest.raises(JoinRefusedError, match="run E and D apart"):
        Cluster().join(Role.ED)
    with pytest.raises(JoinRefusedError, match="text-only"):
        Cluster(multimodal=False).join(Role.E)


def test_a_new_version_may_come_when_all_of_the_old_one_are_gone() -> None:
    cluster = Cluster()
    cluster.join(Role.P, 0)
    newer = {**VERSIONS, "vllm": "0.33.0"}
    with pytest.raises(JoinRefusedError):
        cluster.join(Role.P, 1, versions=newer)
    assert cluster.join(Role.P, 0, agent="upgraded", versions=newer).id == "P0"


# --- beats ------------------------------------------------------------------------------------------------------------


def test_a_beat_carries_incarnations_up_and_down() -> None:
    cluster = Cluster()
    cluster.join()
    cluster.beat("P0", "agent-P-0", 1, "one")
    cluster.beat("P0", "agent-P-0", 2, "one", up=False)
    assert cluster.up() == {"P0": False}
    assert cluster.table.snapshot()[0].reason == "killed"
    cluster.beat("P0", "agent-P-0", 3, "two")
    assert cluster.up() == {"P0": True}
    assert cluster.table.instance("P0").incarnation == "two"


def test_a_beat_that_was_overtaken_is_ignored() -> None:
    cluster = Cluster()
    cluster.join()
    cluster.beat("P0", "agent-P-0", 2, "two")
    cluster.beat("P0", "agent-P-0", 1, "one", up=False)
    assert cluster.up() == {"P0": True}
    assert cluster.table.instance("P0").incarnation == "two"


def test_silence_marks_down_the_next_beat_brings_back_and_long_silence_forgets() -> None:
    cluster = Cluster()
    cluster.join()
    cluster.beat("P0", "agent-P-0")
    cluster.clock.time += 4
    cluster.members.notice_silence()
    assert cluster.up() == {"P0": True}
    cluster.clock.time += 2
    cluster.members.notice_silence()
    assert cluster.table.snapshot()[0].reason == "no beat for 5 s"
    cluster.beat("P0", "agent-P-0", 2)
    assert cluster.up() == {"P0": True}
    cluster.clock.time += FORGET_S + 1
    cluster.members.notice_silence()
    assert cluster.up() == {}
    with pytest.raises(NotAMemberError):
        cluster.beat("P0", "agent-P-0", 3)


def test_the_name_of_a_silent_member_may_be_taken_and_it_is_told_so() -> None:
    cluster = Cluster()
    cluster.join(Role.P, 0)
    cluster.clock.time += 6
    cluster.members.notice_silence()
    assert cluster.join(Role.P, 1, instance="P0", instance_fixed=True).id == "P0"
    with pytest.raises(NotAMemberError, match=r"P0 is the stage at http://127\.0\.0\.4:8001 now"):
        cluster.beat("P0", "agent-P-0", 2)


# --- leaving ----------------------------------------------------------------------------------------------------------


async def test_leaving_gets_nothing_new_and_waits_for_what_is_in_flight() -> None:
    cluster = Cluster()
    cluster.join()
    cluster.beat("P0", "agent-P-0")
    lease = cluster.table.acquire("P0", Work.PREFILL)
    leaving = asyncio.create_task(cluster.members.leave(Leave("P0", "agent-P-0", 30)))
    await asyncio.sleep(0)
    cluster.beat("P0", "agent-P-0", 2)
    assert cluster.up() == {"P0": False}, "a beat that crossed the farewell does not bring it back"
    assert not leaving.done()
    lease.release()
    assert await asyncio.wait_for(leaving, PATIENCE_S) is True
    assert cluster.up() == {}


async def test_a_drain_that_takes_too_long_is_given_up() -> None:
    cluster = Cluster()
    cluster.join()
    cluster.beat("P0", "agent-P-0")
    cluster.table.acquire("P0", Work.PREFILL)
    assert await cluster.members.leave(Leave("P0", "agent-P-0", 0)) is False
    assert cluster.up() == {}


# --- the admin listener ----------------------------------------------------------------------------------------------


def head(cluster: Cluster, *, api_keys: tuple[str, ...] = ()) -> httpx.AsyncClient:
    app = create_app(settings(api_keys=api_keys), cluster.table)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://head")


def admin(cluster: Cluster, *, key: str = KEY) -> httpx.AsyncClient:
    app = create_admin(cluster.table, counts, key=key, members=cluster.members, cluster_key=KEY)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")


async def counts() -> bytes:
    return b"counted 1.0\n"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_only_the_cluster_key_joins_and_it_opens_nothing_on_the_clients_port() -> None:
    body = msgspec.json.encode(asks())
    async with admin(Cluster()) as client:
        for headers in ({}, bearer("client-key"), bearer(KEY + "x"), bearer(""), {"authorization": KEY}):
            refused = await client.post("/cluster/join", content=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "wrong_cluster_key")
        joined = await client.post("/cluster/join", content=body, headers=bearer(KEY))
        assert joined.status_code == 200
        assert msgspec.json.decode(joined.content, type=JoinAnswer).id == "P0"
    async with head(Cluster(), api_keys=("client-key",)) as client:
        assert (await client.get("/v1/models", headers=bearer(KEY))).status_code == 401
        for key in (KEY, "client-key"):
            assert (await client.post("/cluster/join", content=body, headers=bearer(key))).status_code == 404


async def test_the_status_table_of_a_head_wants_the_admin_key_and_health_none() -> None:
    cluster = Cluster()
    cluster.join()
    for key in (KEY, "admin-key-of-its-own"):
        async with admin(cluster, key=key) as client:
            for path in ("/instances", "/metrics"):
                for wrong in ({}, bearer(""), bearer(key + "x")):
                    assert (await client.get(path, headers=wrong)).status_code == 401
            (row,) = (await client.get("/instances", headers=bearer(key))).json()["instances"]
            assert row["id"] == "P0"
            assert (await client.get("/metrics", headers=bearer(key))).content == await counts()
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 404


async def test_what_is_no_message_is_refused_before_it_is_large() -> None:
    async with admin(Cluster()) as client:
        nested, latin = b'{"x":' + b"[" * 30000, b'{"agent": "\xff"}'
        bodies = [(bad, 400) for bad in (b"{}", b'{"role": "X"}', b"[", nested, latin)]
        for body, status in (*bodies, (b"x" * (65 << 10), 413)):
            assert (await client.post("/cluster/join", content=body, headers=bearer(KEY))).status_code == status
        unknown = await client.post("/cluster/beat", content=msgspec.json.encode(Beat("P9", "a", 1, "x", True)),
                                    headers=bearer(KEY))  # fmt: skip
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_a_member")


async def test_without_a_cluster_there_is_nothing_to_join() -> None:
    app = create_admin(InstanceTable(), counts)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
        assert (await client.post("/cluster/join", headers=bearer(""))).status_code == 404


async def test_health_wants_a_whole_path_of_the_roles_that_came() -> None:
    cluster = Cluster()
    async with head(cluster) as client:
        assert (await client.get("/health")).status_code == 503
        for role, status in ((Role.E, 503), (Role.P, 503), (Role.D, 200)):
            name = cluster.join(role, list(Role).index(role)).id
            cluster.beat(name, f"agent-{role}-{list(Role).index(role)}")
            if role is Role.P:
                cluster.table.report_kv(KvReport(name, "one", 0, "adaptive", 0.0, []))
            assert (await client.get("/health")).status_code == status, role


async def test_stages_hear_their_own_key_and_never_the_clients() -> None:
    for key, authorization in (("the-stages-key", "Bearer the-stages-key"), ("", None)):
        async with fake_stages("E0", "PD0", config=settings(stage_key=key, api_keys=("client",))) as c:
            answer = await c.client.post(
                "/v1/chat/completions", json=image_body(data_url(image_file())), headers=bearer("client")
            )
            assert answer.status_code == 200
            for stage in ("E0", "PD0"):
                assert [call.headers.get("authorization") for call in c[stage].calls] == [authorization]
