"""NVIDIA's Multi-Process Service: whether it runs, and what a process's share of SMs is called in its environment.

Without MPS the processes of one GPU take turns: while one's time slice runs, all SMs are its own and the other waits.
A priority of streams orders kernels of one process only (CUDA programming guide, "Stream Priorities"), so between
stages, which are processes, it would do nothing; shares are then not enforced at all, and we say so. Imports no
framework.

Sources: nvidia-cuda-mps-control(1); NVIDIA MPS documentation, "Environment Variables". Has not run on a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

PIPE_DIRECTORY_ENV = "CUDA_MPS_PIPE_DIRECTORY"
PERCENTAGE_ENV = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"

_TOOL = "nvidia-cuda-mps-control"
_QUESTION = "get_default_active_thread_percentage\n"
_TIMEOUT_S = 5.0


def why_no_mps(environment: Mapping[str, str] = os.environ) -> str:
    """ "" when the MPS control daemon runs that processes with this environment find, else why it does not.

    The tool's own answer counts; where it is not installed (in a container whose host runs the daemon), the daemon's
    pid file, which goes with the daemon, and its socket.
    """
    directory = Path(environment.get(PIPE_DIRECTORY_ENV) or DEFAULT_PIPE_DIRECTORY)
    tool = shutil.which(_TOOL, path=environment.get("PATH"))
    if tool is None:
        if (directory / "control").exists() and (directory / f"{_TOOL}.pid").exists():
            return ""
        return f"{_TOOL} is not installed, and {directory} has no daemon's socket"
    try:
        answer = subprocess.run(
            [tool], input=_QUESTION, env=dict(environment), capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"{_TOOL} did not answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        return f"{_TOOL} could not be run: {error.strerror}"
    if answer.returncode == 0 and "annot find" not in answer.stdout + answer.stderr:
        return ""
    message = " ".join((answer.stderr or answer.stdout).split())
    return f"no MPS control daemon at {directory} ({message or f'exit code {answer.returncode}'})"


def percentage(share: float) -> str:
    """A share as `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` takes it. The limit of the daemon holds beside it."""
    return f"{share * 100:g}"
