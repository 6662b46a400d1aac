"""What `epd_serve.engine.compat` finds in the vLLM that is installed is what was read in that vLLM.

It goes by names and source lines of vLLM's; one that is renamed would turn a feature off, and nothing else would say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.engine_facts import METADATA_TRAVELS
from tests.e2e.serving import ROOT, START_S

READ = {
    "0.23": {
        "can_fail_requests": False,
        "hands_over_encoder_cache": False,
        "tells_finished_requests": False,
        "steps_in_flight_at_reuse": 1,
        "spins_between_steps": True,
        "metadata_travels": False,
    },
    "0.32": {
        "can_fail_requests": True,
        "hands_over_encoder_cache": True,
        "tells_finished_requests": True,
        "steps_in_flight_at_reuse": 0,
        "spins_between_steps": True,
        "metadata_travels": True,
    },
}

ASK = """
import importlib.util, json, types
import vllm
from epd_serve.engine import compat
from vllm.distributed.device_communicators import shm_broadcast

spins = shm_broadcast.sched_yield
compat.sleep_between_steps()
async_scheduling = types.SimpleNamespace(max_concurrent_batches=2)
print(json.dumps([vllm.__version__, {
    "can_fail_requests": compat.can_fail_requests(),
    "hands_over_encoder_cache": compat.hands_over_encoder_cache(),
    "tells_finished_requests": compat.tells_finished_requests(),
    "steps_in_flight_at_reuse": compat.steps_in_flight_at_reuse(async_scheduling),
    "spins_between_steps": shm_broadcast.sched_yield is not spins,
    "metadata_travels": importlib.util.find_spec("vllm.distributed.ec_transfer.ec_connector.utils") is not None,
}]))
"""


def test_compat_finds_what_was_read() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "epd_serve/engine/site")}
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, env=env, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    version, found = json.loads(done.stdout.splitlines()[-1])
    read = READ.get(".".join(version.split(".")[:2]))
    if read is None:
        pytest.skip(f"vLLM {version} was not read: {found}")
    assert found == read
    assert found["metadata_travels"] is METADATA_TRAVELS
