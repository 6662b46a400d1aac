"""Three nodes of a Ray cluster on this machine, for all tests of this folder, and what is left when they have ended."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.host.processes import stat
from tests.deploy.ray.nodes import RayNodes, ray_nodes
from tests.waiting import wait_for

if importlib.util.find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]

CPUS = 6


_open = contextlib.ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """No other folder's tests run beside a cluster, which they might find."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _open.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayNodes]:
    """Until the last test of this folder has ended."""
    with _open:
        yield _open.enter_context(_cluster())


@pytest.fixture(scope="session")
def connected(cluster: RayNodes) -> RayNodes:
    """This process takes part in it."""
    return _open.enter_context(_connected(cluster))


@contextlib.contextmanager
def _cluster() -> Iterator[RayNodes]:
    """Every node has CPUs, GPUs and NPUs, of which only Ray knows."""
    with ray_nodes(3, cpus=CPUS, num_gpus=2, resources={"NPU": 2}) as nodes:
        yield nodes
        folder, pids = (
            Path(nodes.env["RAY_AUTH_TOKEN_PATH"]).parent,
            [pid for some in nodes.parts().values() for pid in some],
        )
    wait_for(lambda: all(found is None or found.dead for found in map(stat, pids)), "the end of Ray's processes")
    assert not folder.exists()


@contextlib.contextmanager
def _connected(cluster: RayNodes) -> Iterator[RayNodes]:
    import ray
    from ray._private.authentication_test_utils import reset_auth_token_state

    from deploy.ray.cluster import connect

    before = {name: os.environ.get(name) for name in cluster.env}
    os.environ.update(cluster.env)
    reset_auth_token_state()  # Ray read them when it was imported, which vLLM may have done for an earlier test
    connect(cluster.address)
    yield cluster
    ray.shutdown()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    reset_auth_token_state()
