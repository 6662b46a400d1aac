"""A launch in a process of its own, for tests that look at it from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from deploy.host import processes
from deploy.host.environment import LAUNCH_ENV
from tests.waiting import PATIENCE_S, wait_for

REPOSITORY = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("fake_launch.py"))
DEADLINE_S = PATIENCE_S


class FakeLaunch:
    """One launch under test."""

    def __init__(self, root: Path, port: int, layout: str, *flags: str) -> None:
        self.root, self.port = root, port
        self._printed = tempfile.TemporaryFile("a+")  # noqa: SIM115 - open as long as the launch; in append mode it may be read meanwhile
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, str(root), str(port), layout, *flags],
            stdout=self._printed,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=DEADLINE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, None

    def instances(self) -> dict[str, Any]:
        _, body = self.get("/instances")
        return {row["id"]: row for row in body["instances"]} if body else {}

    def printed(self) -> str:
        """On its standard output, so far."""
        self._printed.seek(0)
        return self._printed.read()

    def wait_ready(self) -> None:
        """Until it serves and has said so."""

        def ready() -> bool:
            return "Ready in" in self.printed() and self.get("/ready?all")[0] == 200

        wait_for(lambda: ready() or self.process.poll() is not None, "ready")
        assert self.process.poll() is None, self.process.communicate()[1]

    @property
    def run_path(self) -> Path:
        """Of this launch: several may share the root."""
        (path,) = (
            path for path in self.root.glob("*/launcher.json") if json.loads(path.read_text())["pid"] == self.pid
        )
        return path.parent

    @property
    def pid(self) -> int:
        return self.process.pid

    def stage_pid(self, instance: str) -> int:
        lines = (self.run_path / "groups.jsonl").read_text().splitlines()
        return next(entry["pid"] for entry in map(json.loads, reversed(lines)) if entry["instance"] == instance)

    def members(self, launch_id: str) -> list[int]:
        return [p.pid for p in processes.running() if processes.has_environment(p.pid, LAUNCH_ENV, launch_id)]

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[str, str]:
        """Its standard output and its standard error, when it has ended."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=DEADLINE_S)
        return self.printed(), err

    def assert_nothing_remains(self, launch_id: str) -> None:
        wait_for(lambda: not self.members(launch_id), "no process")
        assert not list(Path("/dev/shm").glob(f"epd-{launch_id}-*"))
        assert not (self.root / launch_id).exists()
        assert self.get("/health")[0] == 0


def fetch(url: str) -> tuple[int, str]:
    """Status and body; (0, "") where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def children(parent: int) -> dict[int, str]:
    """Names of the running children of a process, by pid."""
    return {one.pid: one.name for one in processes.running() if _parent(one.pid) == parent}


def _parent(pid: int) -> int:
    """0 where it has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
