"""The processes of a cluster under test: a head and the stages that join it, each on an address of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from deploy.host.ports import free_ports
from epd_serve.key_files import admin_key
from tests.deploy.launched import neighbours
from tests.waiting import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]
FAKE_JOIN = str(Path(__file__).with_name("fake_join.py"))
KEY = "0123456789abcdef-cluster"


class Hosts:
    """Processes of one cluster; every one is ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = neighbours(15)
        self.stage_ports = iter(free_ports(40)[::2])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.key_file = folder / "key"
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(KEY + "\n")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        """Where stages join, and operators look."""
        return f"http://127.0.0.1:{self.port + 14}"

    def head(self, *flags: str) -> None:
        argv = ["-m", "deploy.cli", "proxy", "--cluster-key-file", str(self.key_file), "--port", str(self.port)]
        self._start("head", *argv, "--mooncake-master", "none", "--run-root", str(self._root("head")), *flags)

    def stage(self, name: str, role: str, host: str, *flags: str, key_file: Path | None = None) -> str:
        """Start one; its url."""
        port = next(self.stage_ports)
        arguments = (str(self._root(name)), self.admin, str(key_file or self.key_file), role, host, str(port), *flags)
        self._start(name, FAKE_JOIN, *arguments)
        return f"http://{host}:{port}"

    def simulated(self, name: str, role: str, host: str, *flags: str, port: int = 0) -> str:
        """Start a stage as a user does, with `epd-serve stage --join … --engine sim`; its url."""
        port = port or neighbours(4)
        argv = ["-m", "deploy.cli", "stage", "--join", self.admin, "--engine", "sim", "--role", role, "--host", host]
        argv += ["--port", str(port), "--run-root", str(self._root(name)), "--arena-mib", "16"]
        self._start(name, *argv, "--cluster-key-file", str(self.key_file), *flags)
        return f"http://{host}:{port}"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def send(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        self.send(name, number)
        return self.processes.pop(name).wait(PATIENCE_S)

    def instances(self) -> dict[str, dict[str, Any]]:
        found = fetch(f"{self.admin}/instances", admin_key(KEY))[1]
        return {entry["id"]: entry for entry in json.loads(found or "{}").get("instances", [])}

    def up(self) -> list[str]:
        return sorted(name for name, entry in self.instances().items() if entry["up"])

    def leftovers(self, name: str) -> list[Path]:
        return [path for path in self._root(name).iterdir() if path.is_dir()]

    def wirings(self, name: str) -> list[str]:
        """What the lives of its server were wired with, oldest first; a command that is not of a life has no
        incarnation in its file's name."""
        written = sorted(self._root(name).glob("*-?*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [path.read_text() for path in written]

    def end_all(self) -> None:
        """Whatever became of the test."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _root(self, name: str) -> Path:
        (self.folder / f"run-{name}").mkdir(mode=0o700, exist_ok=True)
        return self.folder / f"run-{name}"

    def _start(self, name: str, *argv: str) -> None:
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *argv], env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log, cwd=self.folder
            )


def fetch(url: str, key: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""
