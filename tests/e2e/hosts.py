"""A head and three joined stages, as an operator starts them on four machines; here each has a loopback address.

The head has two proxy processes: what either is told of the stages, the other has to know.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from deploy.host import processes
from deploy.host.ports import free_ports, listen
from epd_serve.errors import ConfigError
from epd_serve.key_files import admin_key, read_cluster_key
from tests.e2e.serving import ROOT, START_S, Endpoint
from tests.waiting import wait_for

ADDRESSES = {"head": "127.0.0.1", "E": "127.0.0.2", "P": "127.0.0.3", "D": "127.0.0.4"}
STOP_S = 30.0


class Hosts(Endpoint):
    """The four processes; requests go to the head. Every one has a run root of its own, as on a machine of its own."""

    ready_path = "/ready?all"

    def __init__(self) -> None:
        self.port = _neighbours(15)
        self.admin = f"http://{ADDRESSES['head']}:{self.port + 14}"
        super().__init__(f"http://{ADDRESSES['head']}:{self.port}")
        self.root = Path(tempfile.mkdtemp(prefix="epd-e2e-", dir="/tmp"))
        self.key_file = self.root / "key"
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(os.urandom(32).hex())
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """`head`, `E`, `P` or `D`. Ports are the same on every machine."""
        head = ["proxy", "--host", ADDRESSES["head"], "--port", str(self.port), "--workers", "2"]
        stage = ["stage", "--join", self.admin, "--role", name, "--host", ADDRESSES[name], "--port", str(self.port + 5)]
        stage += ["--device", "cpu", "--arena-mib", "64", "--mooncake-segment-mib", "128"]
        argv = [sys.executable, "-m", "deploy.cli", *(head if name == "head" else stage)]
        argv += ["--cluster-key-file", str(self.key_file), "--run-root", str(self.root / name)]
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self) -> Hosts:
        wait_for(self.complete, "all stages to join and be ready", START_S)
        return self

    def complete(self) -> bool:
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise AssertionError(f"{name} ended:\n{(self.root / f'{name}.log').read_text()[-3000:]}")
        return self.healthy() and sorted(self.up()) == ["D0", "E0", "P0"]

    def instances(self) -> dict[str, dict[str, Any]]:
        headers = {"authorization": f"Bearer {admin_key(read_cluster_key(str(self.key_file)))}"}
        answer = httpx.get(f"{self.admin}/instances", headers=headers, timeout=STOP_S, trust_env=False)
        return {entry["id"]: entry for entry in answer.json()["instances"]}

    def up(self) -> list[str]:
        return [name for name, entry in self.instances().items() if entry["up"]]

    def counters(self, instance: str) -> dict[str, int]:
        """What the instance counts of the MM Store."""
        found: dict[str, int] = (self.instances()[instance]["store"] or {}).get("counters", {})
        return found

    def run(self, name: str) -> Path:
        """The run directory on one machine."""
        (path,) = [path for path in (self.root / name).iterdir() if (path / "launcher.json").exists()]
        return path

    def group(self, name: str, of: str) -> int:
        """Leader of the newest process group of a name in a machine's run directory."""
        lines = (self.run(name) / "groups.jsonl").read_text().splitlines()
        return int([entry for entry in map(json.loads, lines) if entry["instance"] == of][-1]["pid"])

    def stage_log(self, name: str) -> str:
        return (self.run(name) / f"{name}0.log").read_text(errors="replace")

    def stage(self, name: str) -> Endpoint:
        """A stage's own server."""
        return Endpoint(f"http://{ADDRESSES[name]}:{self.port + 5}")

    def stop(self) -> None:
        """Stages first, as an operator would; nothing of anybody remains."""
        runs = {name: self.run(name) for name in self.processes}
        groups = {group for run in runs.values() for group in _groups(run)}
        for name in ("E", "P", "D", "head"):
            process = self.processes.pop(name)
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=STOP_S)
            assert code == 0, f"{name}: exit code {code}:\n{(self.root / f'{name}.log').read_text()[-2000:]}"
        assert not [group for group in groups if processes.group_members(group)], "processes remain"
        for run in runs.values():
            assert not run.exists(), "a run directory remains"
            assert not list(Path("/dev/shm").glob(f"epd-{run.name}-*")), "shared memory remains"

    def destroy(self) -> None:
        """For tests that failed: leave nothing."""
        runs = [path for name in ADDRESSES for path in (self.root / name).glob("*") if path.is_dir()]
        for group in [
            *(process.pid for process in self.processes.values()),
            *(g for run in runs for g in _groups(run)),
        ]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        for run in runs:
            for path in Path("/dev/shm").glob(f"epd-{run.name}-*"):
                path.unlink()
        shutil.rmtree(self.root, ignore_errors=True)


def _neighbours(count: int) -> int:
    """The first of some ports in a row that are free on every address used here."""
    for first in free_ports(100):
        with contextlib.suppress(ConfigError):
            for port in range(first, first + count):
                for address in ADDRESSES.values():
                    listen(address, port).close()
            return first
    raise AssertionError(f"no {count} free ports in a row")


def _groups(run: Path) -> list[int]:
    with contextlib.suppress(ValueError, FileNotFoundError):
        return [json.loads(line)["pid"] for line in (run / "groups.jsonl").read_text().splitlines()]
    return []


@contextlib.contextmanager
def hosts_serving() -> Iterator[Hosts]:
    """All four ready; at the end Ctrl-C on each, with its promises checked."""
    made = Hosts()
    try:
        for name in ADDRESSES:
            made.start(name)
        yield made.wait_ready()
        made.stop()
    finally:
        made.destroy()
