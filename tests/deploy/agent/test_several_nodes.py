"""Instances on different nodes work together: over ports that only members may use, features and KV judged by node."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from epd_serve.errors import ConfigError
from epd_serve.key_files import read_key, stage_key
from tests.deploy.nodes_here import Nodes, nodes
from tests.deploy.sim_load import CHAT, TEXT, picture
from tests.waiting import PATIENCE_S, until

HOSTS = {"a": "127.0.0.1", "b": "::1"}
WHERE = {"E0": "a", "P0": "a", "D0": "b"}


@pytest.fixture
async def several(tmp_path: Path) -> AsyncIterator[Nodes]:
    """E and P on one node, D on another one, which has an IPv6 address."""
    blueprint = draw(DeployConfig(engine="sim", layout="(E-P)-D", device="cpu", arena_mib=16, kv_staging_mib=4))
    async with nodes(tmp_path, blueprint, HOSTS, WHERE) as made:
        yield made


async def _counted(made: Nodes, transfers: int) -> bool:
    return bool((await made.link("P0", "D0"))["transfers"] == transfers)


async def _counter(made: Nodes, start: str) -> int:
    """What P counts of the store, under all names that start so."""
    counters = (await made.statuses())["P0"]["store"]["counters"]
    return sum(count for name, count in counters.items() if name.startswith(start))


async def asked(made: Nodes, body: dict[str, object]) -> httpx.Headers:
    answer = await made.client.post(CHAT, json=body, headers={"x-epd-explain": "1"})
    assert answer.status_code == 200, answer.text
    return answer.headers


async def test_text_and_pictures_pass_from_node_to_node(several: Nodes) -> None:
    assert (await asked(several, TEXT))["x-epd-path"] == "P-D"
    assert (await asked(several, picture(60)))["x-epd-path"] == "E-P-D"
    assert [several.instance(name).node for name in WHERE] == list(WHERE.values())
    assert several.instance("D0").url.startswith("http://[::1]:")
    link = await several.link("P0", "D0")
    assert (link["transport"], link["reason"]) == ("sim/mooncake", "from node a to node b")
    await until(lambda: _counted(several, 2))
    assert not await _counter(several, "recomputed"), "E's feature came by the node's arena"


async def test_features_of_another_node_come_by_the_second_tier_that_is_simulated_between_nodes(tmp_path: Path) -> None:
    blueprint = draw(DeployConfig(engine="sim", layout="E-P-D", device="cpu", arena_mib=16, kv_staging_mib=4))
    where = {"E0": "b", "P0": "a", "D0": "a"}
    async with nodes(tmp_path, blueprint, {"a": "127.0.0.1", "b": "127.0.0.2"}, where) as made:
        await asked(made, picture(60))
        await until(lambda: _counter(made, "fetched"))
        assert not await _counter(made, "recomputed")
        assert (await made.link("P0", "D0"))["transport"] == "sim/shm"


async def test_a_stage_answers_its_proxy_only(several: Nodes) -> None:
    instance = several.instance("D0")
    async with httpx.AsyncClient(base_url=instance.url, timeout=PATIENCE_S, trust_env=False) as stranger:
        assert (await stranger.get("/health")).status_code == 200
        assert (await stranger.get("/metrics")).status_code == 401
        key = stage_key(read_key(several.key_file, "key"))
        assert (await stranger.get("/metrics", headers={"authorization": f"Bearer {key}"})).status_code == 200


async def test_what_is_for_another_node_is_refused_and_ports_are_given_back(several: Nodes) -> None:
    order = several.seen["D0"].order
    with pytest.raises(ConfigError, match="this is a"):
        await several.agents["a"].start(order)
    port = int(several.instance("D0").url.rpartition(":")[2])
    await several.agents["b"].stop("D0", 5.0)
    for at in range(6):
        socket.create_server(("::1", port + at), family=socket.AF_INET6).close()
