"""The threads that torch computes with, made and bound after a fork, as a stage's worker does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from epd_serve.engine.compat import worker_libraries

_FORKED = """
import json, os, sys
import torch
from npu_ops.openmp import bind_team, set_team_size, team
cores = json.loads(sys.argv[1])
if (pid := os.fork()) != 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
set_team_size(len(cores))
bind_team(cores)
threads = os.listdir("/proc/self/task")
print(json.dumps([[sorted(os.sched_getaffinity(one)) for one in team()], len(threads)]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_each_thread_of_a_forked_team_is_bound_to_its_core(count: int) -> None:
    cores = sorted(os.sched_getaffinity(0))[:count]
    if len(cores) < count:
        pytest.skip(f"needs {count} cores")
    env = {**os.environ, **worker_libraries(os.environ), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _FORKED, json.dumps(cores)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    affinities, threads = json.loads(done.stdout)
    assert affinities == [[core] for core in cores]
    assert threads == count
