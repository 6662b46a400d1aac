"""What a new program begins with and a fork does not: an environment, random numbers, threads on their cores."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import process

from epd_serve.cpu_threads import COUNT_ENV
from npu_ops.openmp import bind_team, set_team_size

_CORES_ENV = "GOMP_CPU_AFFINITY"
_PREFIXES = ("LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GLIBC_", "MALLOC_", "TCMALLOC_", "ONEDNN_", "DNNL_")


def begin_afresh(env: Mapping[str, str]) -> None:
    """Replace this process's environment, and what Python made of the former one or drew from chance."""
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    process.current_process().authkey = os.urandom(32)
    if "numpy" in sys.modules:  # `random` and torch see to it themselves
        sys.modules["numpy"].random.seed()


def native_environment() -> dict[str, str]:
    """What native libraries read of the environment when they are loaded, so that a change would need a new program.

    The size and the cores of an OpenMP team are not among it: see `obey_openmp`.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PREFIXES) and name not in (COUNT_ENV, _CORES_ENV)
    }


def obey_openmp() -> None:
    """Do what libgomp would have done with the environment when it was loaded: so many threads, each on its core.

    vLLM sets both for each worker (`utils/ompmultiprocessing.py`).
    """
    if "torch" not in sys.modules:
        return
    if threads := os.environ.get(COUNT_ENV):
        set_team_size(int(threads))
    if cores := os.environ.get(_CORES_ENV):
        bind_team([int(core) for core in cores.split()])
