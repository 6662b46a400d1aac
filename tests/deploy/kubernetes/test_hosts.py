"""Node pods are known as the API server says: by what a real one has said, and whatever goes wrong in between."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deploy.kubernetes import api
from deploy.kubernetes.hosts import KubernetesHosts
from epd_serve.errors import ConfigError, EpdError
from tests.deploy.kubernetes.api_server import PODS, RECORDED, FakeApiServer, recorded, watched
from tests.waiting import until

WATCH = f"GET {PODS} watch"
LIST = f"GET {PODS}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_S", 0.01)
    monkeypatch.setattr(api, "RETRY_MAX_S", 0.05)


@contextlib.asynccontextmanager
async def hosts(server: FakeApiServer, deployment: str = "epd") -> AsyncIterator[KubernetesHosts]:
    one = KubernetesHosts(server.client(), deployment)
    running = asyncio.create_task(one.run())
    try:
        yield one
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.wait([running])


def pod(name: str, step: str = "ready", **meta: Any) -> dict[str, Any]:
    """As one was in a step of a life that was recorded."""
    made: dict[str, Any] = copy.deepcopy(recorded("life")[step])
    made["metadata"] |= {"name": name, "uid": f"{name}-0000-0000", **meta}
    return made


async def names(one: KubernetesHosts, *wanted: str) -> None:
    await until(lambda: one.pods is not None and [host.name for host in one.there] == [*wanted], f"pods {wanted}")


# --- what a real API server has said ----------------------------------------------------------------------------------


async def test_a_watch_that_was_recorded_leads_to_what_was_listed_at_its_end(server: FakeApiServer) -> None:
    server.lists, server.watches = ["list-empty.json"], ["watch-life.jsonl"]
    async with hosts(server) as one:
        seen: list[set[tuple[str, bool]]] = []

        async def look() -> None:
            async for there in one.watch():
                seen.append({(host.id, host.leaving) for host in there})

        looking = asyncio.create_task(look())
        await until(lambda: server.asked.count(WATCH) == 2, "the watch to end")
        end = json.loads((RECORDED / "list-end.json").read_bytes())["items"]
        assert {pod.host.id for pod in one.pods or ()} == {
            f"{item['metadata']['name']}.{item['metadata']['uid'][:8]}" for item in end
        }
        assert all(host.devices == 4 and host.address for host in one.there)
        looking.cancel()
    assert server.asked.count(LIST) == 1, "a watch that ends goes on where it was"
    everybody = {id for there in seen for id, _ in there}
    left = {id for there in seen for id, leaving in there if leaving}
    assert len(everybody) > len(end) and left and left < everybody


def test_what_was_recorded_has_all_kinds_of_events() -> None:
    text = b"".join(piece for _, piece in watched("watch-life.jsonl"))
    kinds = {json.loads(line)["type"] for line in text.splitlines()}
    assert kinds == {"ADDED", "MODIFIED", "DELETED", "BOOKMARK"}


async def test_a_watch_whose_server_was_killed_goes_on_from_what_it_said_last(server: FakeApiServer) -> None:
    server.lists, server.watches = ["list-end.json"], ["watch-killed.jsonl"]
    async with hosts(server) as one:
        await until(lambda: server.asked.count(WATCH) == 2, "it to be asked again")
        assert len(one.there) == 2 and any(pod.annotations.get("x") == "killed" for pod in one.pods or ())
    assert server.asked.count(LIST) == 1


async def test_a_watch_of_what_is_history_lists_again(server: FakeApiServer) -> None:
    server.watches = ["watch-gone.jsonl"]
    server.put(pod("a"))
    async with hosts(server) as one:
        await until(lambda: server.asked.count(LIST) == 2, "another list")
        server.put(pod("b"))
        await names(one, "a", "b")


@pytest.mark.parametrize("name", ["unauthorized", "forbidden"])
async def test_who_may_not_list_is_told_so_and_what_passes_is_no_trouble(
    server: FakeApiServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.refusals = [name]  # as a server that has just begun
    server.put(pod("a"))
    async with hosts(server) as one:
        await names(one, "a")
        server.refusals = [name] * 3
        server.cut()
        server.put(pod("b"))
        await names(one, "a", "b")
    monkeypatch.setattr(api, "FIRST_S", 0.0)
    server.refusals = [name] * 2
    with pytest.raises(EpdError, match=rf"{PODS} is refused: 40[13]"):
        await KubernetesHosts(server.client(), "epd").run()


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_a_server_that_restarts_is_asked_again_and_what_it_said_stays(server: FakeApiServer) -> None:
    server.put(pod("a"))
    async with hosts(server) as one:
        await names(one, "a")
        await server.stop()
        server.remove("a")
        server.put(pod("b"))
        assert [host.name for host in one.there] == ["a"]
        await server.start()
        await names(one, "b")
        server.put(pod("c"))
        await names(one, "b", "c")


async def test_history_that_goes_while_it_is_watched_is_listed_again(server: FakeApiServer) -> None:
    server.put(pod("a"))
    async with hosts(server) as one:
        await names(one, "a")
        server.remove("a")
        server.put(pod("b"))
        server.forget()
        server.cut()
        await names(one, "b")


async def test_a_bookmark_saves_a_list_where_history_before_it_is_gone(server: FakeApiServer) -> None:
    server.bookmark_s = 0.02
    server.put(pod("a"))
    async with hosts(server) as one:
        await names(one, "a")
        await until(lambda: server.bookmarks)
        server.forget()
        before = server.bookmarks
        await until(lambda: server.bookmarks > before + 1, "one that is later than what is forgotten")
        server.cut()
        await until(lambda: server.asked.count(WATCH) >= 2)
        server.put(pod("b"))
        await names(one, "a", "b")
        assert server.asked.count(LIST) == 1


async def test_a_watch_that_is_silent_for_too_long_is_dead(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "WATCH_S", 1.0)
    monkeypatch.setattr(api, "SLACK_S", -0.7)
    server.put(pod("a"))
    async with hosts(server) as one:
        await names(one, "a")
        server.deaf = True
        await until(lambda: server.asked.count(WATCH) >= 3, "it to be asked again")
        server.deaf = False
        server.put(pod("b"))
        await names(one, "a", "b")


async def test_slow_answers_and_other_pods_are_no_trouble(server: FakeApiServer) -> None:
    server.slow_s = 0.1
    server.put(pod("a"))
    server.put(pod("z", labels={"app.kubernetes.io/instance": "other", "app.kubernetes.io/component": "node"}))
    async with hosts(server) as one:
        await names(one, "a")
        server.put(pod("b"))
        await names(one, "a", "b")


async def test_a_token_that_is_rotated_is_read_again(server: FakeApiServer) -> None:
    server.put(pod("a"))
    async with hosts(server) as one:
        await names(one, "a")
        server.rotate("second")
        server.cut()
        server.put(pod("b"))
        await names(one, "a", "b")


async def test_who_is_never_answered_says_so(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FIRST_S", 0.1)
    await server.stop()
    with pytest.raises(EpdError, match="does not answer"):
        await KubernetesHosts(server.client(), "epd").run()


# --- what a pod is ----------------------------------------------------------------------------------------------------


async def test_a_pod_is_a_host_from_its_start_to_its_end_and_asked_while_its_container_runs(
    server: FakeApiServer,
) -> None:
    async with hosts(server) as one:
        server.put(pod("a", "pending"))
        await until(lambda: one.coming and one.pods)
        assert one.there == ()
        for step in ("scheduled", "running"):
            server.put(pod("a", step))
        await names(one, "a")
        (host,) = one.there
        assert host.id == "a.a-0000-0" and host.devices == 4 and not host.leaving and not one.coming
        assert await one.find(host.id) == await one.reach(host.id) == f"{host.address}:9443"
        server.put(pod("a", "terminated"))

        async def stopped() -> bool:
            return await one.find(host.id) == ""

        await until(stopped)
        assert one.there == (host,), "its container begins again"
        with pytest.raises(EpdError, match="does not run"):
            await one.reach(host.id)
        server.put(pod("a", "running"))

        async def begun() -> bool:
            return await one.find(host.id) == f"{host.address}:9443"

        await until(begun, "it to be found again")
        server.put(pod("a", "leaving", deletionTimestamp="2026-01-01T00:00:00Z"))
        await until(lambda: one.there[0].leaving)
        assert await one.find(host.id)
        server.remove("a")
        await names(one)
        with pytest.raises(EpdError, match="does not run"):
            await one.reach(host.id)


def test_outside_a_pod_it_is_refused(monkeypatch: pytest.MonkeyPatch, server: FakeApiServer) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="is for a pod"):
        api.ApiServer.of_this_pod(server.account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ConfigError, match="service account"):
        api.ApiServer.of_this_pod(server.folder)
    assert api.ApiServer.of_this_pod(server.account).namespace == "epd"
