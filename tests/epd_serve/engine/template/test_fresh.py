"""What a fork has to be given anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from epd_serve.engine import compat
from epd_serve.engine.template.fresh import native_environment

_TWINS = """
import os, tempfile
import numpy
from multiprocessing import process
from epd_serve.engine.template.fresh import begin_afresh
tempfile.gettempdir()
for name in ("one", "other"):
    if os.fork() == 0:
        begin_afresh({"ONLY": name, "TMPDIR": f"/dev/shm"})
        drawn, key = numpy.random.randint(1 << 62), process.current_process().authkey.hex()
        print(dict(os.environ) == {"ONLY": name, "TMPDIR": "/dev/shm"}, tempfile.gettempdir(), drawn, key, flush=True)
        os._exit(0)
    os.wait()
"""

_CONFIGURE = """
import json, os
from epd_serve.demo.presets import builtin_model_dir
from vllm.engine.arg_utils import AsyncEngineArgs
AsyncEngineArgs(model=str(builtin_model_dir()), enforce_eager=True).create_engine_config()
print(json.dumps(dict(os.environ)))
"""


def test_forks_share_neither_environment_nor_random_numbers() -> None:
    done = subprocess.run([sys.executable, "-c", _TWINS], capture_output=True, text=True, timeout=60, check=True)
    one, other = (line.split() for line in done.stdout.splitlines())
    assert one[:2] == other[:2] == ["True", "/dev/shm"]
    assert one[2] != other[2] and one[3] != other[3]


def test_a_workers_threads_and_cores_can_be_set_later_and_what_libraries_read_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = native_environment()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    assert native_environment() == before
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    assert {"OMP_WAIT_POLICY", "LD_PRELOAD"} <= native_environment().keys()


@pytest.mark.slow
def test_the_template_runs_with_the_libraries_that_vllm_gives_a_worker() -> None:
    """`CpuPlatform.check_and_update_config` adds to the environment what a worker on CPU has to be executed with."""
    pytest.importorskip("vllm")
    before = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    before |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(compat.__file__).with_name("site"))}
    done = subprocess.run(
        [sys.executable, "-c", _CONFIGURE], env=before, capture_output=True, text=True, timeout=300, check=True
    )
    after = json.loads(done.stdout.splitlines()[-1])
    expected = compat.worker_libraries(before)
    assert {name: after.get(name) for name in expected} == expected
