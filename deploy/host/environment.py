"""The one file of this package that reads the environment, and makes that of the stages; and what stderr is told."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Mapping
from pathlib import Path

from epd_serve import cpu_threads
from epd_serve.engine.argv import HCCL_PORTS_ENV, V2_RUNNER_ENV

LAUNCH_ENV = "EPD_SERVE_LAUNCH"
"""Set to the launch id in every process of a launch; the reaper recognises orphans by it."""

LAUNCHER_PID_ENV = "EPD_SERVE_LAUNCHER_PID"
"""A stage asks the kernel to die with this process."""

_OPERATORS = frozenset((*cpu_threads.OPERATORS_ENV, *HCCL_PORTS_ENV, V2_RUNNER_ENV))
"""What stages keep where the environment of `serve` has it: threads, ports, vLLM's model runner."""

_HOUSE = Path(__file__).resolve().parents[2]


def run_root() -> Path:
    """Where run directories lie: `${XDG_RUNTIME_DIR or /tmp}/epd-serve-<uid>`."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    if not (base.is_dir() and os.access(base, os.W_OK)):
        base = Path("/tmp")
    return base / f"epd-serve-{os.getuid()}"


def environment() -> Mapping[str, str]:
    """What this process was started with."""
    return os.environ


def shm_root() -> Path:
    return Path("/dev/shm")


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """argv that runs a module of ours, whatever lies in the working directory; goes with `module_path`."""
    return (sys.executable, "-P", "-m", module, *arguments)


def module_path() -> str:
    """PYTHONPATH under which `module_command` finds our packages, the installed or the checked-out ones."""
    return os.pathsep.join(filter(None, (str(_HOUSE), os.environ.get("PYTHONPATH"))))


def module_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": module_path()}


def stage_environment(added: Mapping[str, str], run_path: Path, device: str, parent: int = 0) -> dict[str, str]:
    """Environment of a stage process: ours, what its command adds, and the marks of this launch.

    vLLM's sockets and temporary files go into the run directory, which is removed at the end: in /tmp they would stay
    after every start.

    Args:
        parent: pid of its parent, with which it dies; 0: this process.
    """
    env = {**os.environ, **not_the_operators(added), "PYTHONUNBUFFERED": "1", "TMPDIR": str(run_path)}
    env |= {LAUNCH_ENV: run_path.name, LAUNCHER_PID_ENV: str(parent or os.getpid())}
    inherited = os.environ.get("PYTHONPATH")
    if inherited and "PYTHONPATH" in added:
        env["PYTHONPATH"] = f"{added['PYTHONPATH']}{os.pathsep}{inherited}"
    if device == "cuda":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the ids that nvidia-smi shows
    return env


def not_the_operators(added: Mapping[str, str]) -> dict[str, str]:
    """What a stage's command adds, but for what the operator has decided in our environment."""
    return {name: value for name, value in added.items() if not (name in _OPERATORS and name in os.environ)}


def say(line: str) -> None:
    """To stderr. A terminal that is held (Ctrl-S), or a disk that is full, holds nobody up."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{line}\n".encode())


def is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
