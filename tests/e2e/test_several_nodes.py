"""Real stages on two nodes of one machine: between them KV goes by Mooncake over TCP, features by its store.

The nodes are loopback addresses, and told apart by their ids alone; what crosses is what would cross a network.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.host import processes
from deploy.host.ports import exposed
from deploy.host.rundir import read_groups
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from tests.deploy.nodes_here import nodes
from tests.e2e.bodies import SOLO, Body, about, ask, fresh
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT
from tests.e2e.serving import Endpoint, recomputed

HOSTS = {"a": "127.0.0.2", "b": "127.0.0.3"}
WHERE = {"E0": "a", "P0": "a", "E1": "b", "D0": "b"}

pytestmark = [pytest.mark.slow, pytest.mark.mooncake]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="epd-e2e-", dir="/tmp") as path:
        yield Path(path)


async def test_tokens_equal_the_monoliths_with_kv_and_features_between_nodes(
    folder: Path, solo_answer: Callable[[Body], list[list[int]]]
) -> None:
    bodies = [
        *(SOLO[name] for name in SOLO),
        *map(about, PAIRWISE_DIFFERENT),
        *(fresh(number) for number in range(640, 646)),
    ]
    alone = [await asyncio.to_thread(solo_answer, body) for body in bodies]
    config = DeployConfig(
        layout="2E-P-D", device="cpu", arena_mib=64, kv_staging_mib=4, mm_store="mooncake", mooncake_segment_mib=128
    )
    async with nodes(folder, draw(config), HOSTS, WHERE) as made:
        link = await made.link("P0", "D0")
        assert (link["transport"], link["reason"]) == ("mooncake/tcp", "from node a to node b")
        proxy = Endpoint(made.url)
        for body, answer in zip(bodies, alone, strict=True):
            assert await asyncio.to_thread(ask, proxy, body) == answer
        statuses = await made.statuses()
        assert statuses["P0"]["store"]["counters"].get("fetched"), "features of the other node's encoder"
        assert recomputed(statuses["P0"]["store"]["counters"]) == 0
        (link,) = [one for one in statuses["P0"]["kv_links"] if one["peer"] == "D0"]
        assert link["transfers"] >= len(bodies) and link["failed"] == 0
        for name, host in HOSTS.items():
            groups = read_groups(made.runs[name].path)
            members = [member.pid for group in groups for member in processes.group_members(group)]
            assert await exposed(members, host) == [], f"ports of {name} that answer elsewhere"
