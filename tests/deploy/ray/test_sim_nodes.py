"""On which nodes of a cluster anything of a deployment runs."""

from __future__ import annotations

import pytest

from tests.deploy.ray.deployed import deployed_on, load
from tests.deploy.ray.nodes import RayNodes
from tests.deploy.ray.on_ray import NODE, kind_of, node_of
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def test_a_node_on_which_nothing_is_leased_is_left_and_used_again_when_something_is(cluster: RayNodes) -> None:
    """But for that with the front doors. To Ray's autoscaler a node with an actor is never idle."""
    with deployed_on(cluster, "EP-D", "packed", "--placement", "pack") as found:

        def used() -> set[str]:
            parts = found.deployment.status()["parts"]
            return {node_of(part) for part in parts if kind_of(part) in (NODE, "node actor")}

        def needed() -> set[str]:
            return {cluster.nodes[0].id, *found.nodes.values()}

        wait_for(lambda: used() == needed(), "the other nodes to be left")
        fewest = used()
        assert len(fewest) < len(cluster.nodes)
        with load(found) as requests:
            found.changed("scale", "EP=12")
            assert used() == needed() == {node.id for node in cluster.nodes}
            found.changed("scale", "EP=1")
            wait_for(lambda: used() == needed(), "the other nodes to be left again")
            assert len(used()) < len(cluster.nodes)
        assert (requests.errors, requests.cut) == ([], [])
