"""What `epd_serve.engine.compat` finds in the vLLM that is installed is what was read in that vLLM.

It goes by names and source lines of vLLM's: one that is renamed would turn a feature off, and nobody would be told.
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
        "steps_as_read": True,
        "metadata_travels": False,
        "renames_items": True,
    },
    "0.32": {
        "can_fail_requests": True,
        "hands_over_encoder_cache": True,
        "tells_finished_requests": True,
        "steps_in_flight_at_reuse": 0,
        "spins_between_steps": True,
        "steps_as_read": True,
        "metadata_travels": True,
        "renames_items": False,
    },
}

ASK = """
import json
from types import SimpleNamespace as Config
import vllm
from epd_serve.engine import compat, idle_steps, queue_bell
from epd_serve.errors import ConfigError
from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.engine.core import EngineCoreProc

def refused(check, config):
    try:
        check(config)
    except ConfigError:
        return True
    return False

spins = shm_broadcast.SpinCondition
queue_bell.wait_asleep()
idle_steps.sleep_between_idle_steps()
async_scheduling = Config(max_concurrent_batches=2)
no_caches = Config(
    model_config=Config(multimodal_config=Config(mm_processor_cache_gb=0)),
    cache_config=Config(enable_prefix_caching=False),
)
print(json.dumps([vllm.__version__, {
    "can_fail_requests": compat.can_fail_requests(),
    "hands_over_encoder_cache": compat.hands_over_encoder_cache(),
    "tells_finished_requests": compat.tells_finished_requests(),
    "steps_in_flight_at_reuse": compat.steps_in_flight_at_reuse(async_scheduling),
    "spins_between_steps": shm_broadcast.SpinCondition is not spins,
    "steps_as_read": hasattr(EngineCoreProc._process_engine_step, "epd_serve_sleeps"),
    "metadata_travels": compat.metadata_travels(),
    "renames_items": refused(compat.check_item_names, no_caches),
}]))
"""


def test_compat_finds_what_was_read() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "epd_serve/engine/site")}
    argv = [sys.executable, "-c", ASK]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    version, found = json.loads(done.stdout.splitlines()[-1])
    read = READ.get(".".join(version.split(".")[:2]))
    if read is None:
        pytest.skip(f"vLLM {version} was not read: {found}")
    assert found == read
    assert found["metadata_travels"] is METADATA_TRAVELS
