"""A worker gets its share of cores: on a stand-in for `torch.npu` with its rules, and on this machine's own cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from npu_ops.core_grants import CoreGrant, CoreOrder
from npu_ops.core_limits import CoreLimitError, limit_at_set_device, limit_npu, whole_cores
from tests.fake_npu.cores import FakeCores

SHARES = {"E0": 0.3, "P0": 0.7}


def order(instance: str = "E0", shares: dict[str, float] = SHARES) -> CoreOrder:
    return CoreOrder("npu", instance, shares)


def start(npu: FakeCores, of: CoreOrder) -> list[CoreGrant]:
    """As vllm-ascend's worker starts: its device first, then work."""
    grants: list[CoreGrant] = []
    limit_at_set_device(of, grants.append, npu)
    npu.set_device("npu:0")
    npu.work()
    return grants


def test_the_limit_is_set_after_the_device_and_before_any_operation() -> None:
    npu = FakeCores()
    assert start(npu, order()) == [CoreGrant(0, 0.3, {"cube": 7, "vector": 14}, {"cube": 24, "vector": 48})]
    assert npu.limits == {0: {"cube_core_num": 7, "vector_core_num": 14}}
    assert npu.broken == []


def test_threads_that_set_the_device_later_change_nothing() -> None:
    npu = FakeCores()
    grants = start(npu, order())
    npu.set_device(0)
    assert len(grants) == 1 and npu.broken == []


def test_the_rank_of_a_grant_is_the_device_that_was_set() -> None:
    npu, grants = FakeCores(devices=2), []
    limit_at_set_device(order(), grants.append, npu)
    npu.set_device("npu:1")
    assert [grant.rank for grant in grants] == [1] and set(npu.limits) == {1}


@pytest.mark.parametrize("mistake", ["before the device", "after work"])
def test_the_stand_in_knows_the_rules(mistake: str) -> None:
    """What a hook in another place would do."""
    npu = FakeCores()
    if mistake == "after work":
        npu.set_device(0)
        npu.work()
    with pytest.raises(CoreLimitError, match="--core-share"):
        limit_npu(npu, 0, order())
    assert npu.broken


@pytest.mark.parametrize("shares", [SHARES, {"E0": 0.02, "P0": 0.98}, {"E0": 0.1, "P0": 0.45, "D0": 0.45}])
@pytest.mark.parametrize("cores", [(24, 48), (20, 40), (25, 48), (3, 3)])
def test_neighbours_together_have_no_more_than_the_device(cores: tuple[int, int], shares: dict[str, float]) -> None:
    total = dict(zip(("cube", "vector"), cores, strict=True))
    parts = [whole_cores(total, order(name, shares)) for name in shares]
    for kind, count in total.items():
        assert sum(part[kind] for part in parts) <= count
        assert all(part[kind] >= 1 for part in parts)


def test_cube_and_vector_cores_stay_in_the_devices_ratio() -> None:
    assert whole_cores({"cube": 20, "vector": 40}, order()) == {"cube": 6, "vector": 12}


@pytest.mark.parametrize(("cube", "vector"), [(0, 0), (24, 0), (-1, -1)])
def test_unknown_core_counts_end_the_worker(cube: int, vector: int) -> None:
    with pytest.raises(CoreLimitError, match=r"does not say how many cores it has .*--core-share"):
        start(FakeCores(cube, vector), order())


def test_a_device_with_fewer_cores_than_stages_ends_the_worker() -> None:
    with pytest.raises(CoreLimitError, match="1 core for 2 shares; correct or remove --core-share"):
        start(FakeCores(1, 2), order())


def test_a_runtime_without_limits_ends_the_worker() -> None:
    class Old(FakeCores):
        def set_device_limit(self, device: int, cube_num: int = -1, vector_num: int = -1) -> None:
            raise RuntimeError("Failed to find function aclrtSetDeviceResLimit")

    with pytest.raises(CoreLimitError, match=r"takes no core limit .*aclrtSetDeviceResLimit; .*--core-share"):
        start(Old(), order())


def test_a_limit_that_is_read_back_otherwise_ends_the_worker() -> None:
    npu = FakeCores()
    npu.obeys = 1
    with pytest.raises(CoreLimitError, match=r"limit of \{'cube': 6, .*\} where \{'cube': 7, 'vector': 14\}"):
        start(npu, order())


_ON_CPU = """
import json, sys
from npu_ops.core_grants import CoreOrder
from npu_ops.core_limits import CoreLimitError, cpu_grant
cores = tuple(json.loads(sys.argv[1]))
grant = cpu_grant(0, CoreOrder("cpu", "E0", {"E0": 0.5, "P0": 0.5}, cores))
try:
    cpu_grant(0, CoreOrder("cpu", "E0", {"E0": 0.5, "P0": 0.5}, (max(cores) + 1,)))
    error = ""
except CoreLimitError as refused:
    error = str(refused)
print(json.dumps([grant.cores, grant.core_ids, error]))
"""


def test_on_cpu_the_affinity_of_the_computing_threads_is_read_back_and_compared() -> None:
    """In a process with the environment that vLLM's CPU worker gives OpenMP."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    bound = {"OMP_PLACES": f"{{{','.join(map(str, cores))}}}", "OMP_PROC_BIND": "true"}
    env = {**os.environ, **bound, "OMP_NUM_THREADS": str(len(cores))}
    command = [sys.executable, "-c", _ON_CPU, json.dumps(cores)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    counted, ids, error = json.loads(done.stdout)
    assert (counted, ids) == ({"cpu": len(cores)}, cores)
    assert f"computing threads run on cores {cores}, not on {[max(cores) + 1]} alone" in error
    assert "VLLM_CPU_OMP_THREADS_BIND" in error and "--core-share" in error
