"""A layout served for a measurement: `epd-serve serve` in a process of its own, as a user starts it.

Owns the process and its scratch folder. Both end with the context, the process also with a measurement that is killed.
A folder has a short name, for sockets lie in it, and carries the process that made it: whoever makes the next one
removes those of the dead. What is asked of a launch is the caller's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.agent.cpu_time import Parts, groups, parts
from deploy.host.ports import free_ports
from deploy.host.started import started
from epd_serve.endpoint import unix_url
from epd_serve.errors import ConfigError
from npu_ops.discovery import DeviceInventory
from npu_ops.properties import read_properties

ROOT = Path("/tmp")
SETTLED_S = 120.0
"""What a killed measurement had started takes its time to end, and needs its folder for it."""
_NAME = re.compile(r"epd-bench-(\d+)-")


@contextlib.contextmanager
def scratch(root: Path = ROOT) -> Iterator[Path]:
    """A new folder, removed at the end of the context."""
    remove_dead(root)
    with tempfile.TemporaryDirectory(prefix=f"epd-bench-{os.getpid()}-", dir=root) as made:
        yield Path(made)


def remove_dead(root: Path = ROOT, settled_s: float = SETTLED_S) -> None:
    """Remove folders of measurements that are dead, unless they changed lately or are somebody else's."""
    for found in root.glob("epd-bench-*"):
        name = _NAME.match(found.name)
        with contextlib.suppress(OSError):  # gone meanwhile
            about = found.lstat()
            if name is None or Path(f"/proc/{name[1]}").exists() or about.st_uid != os.getuid():
                continue
            if time.time() - about.st_mtime >= settled_s:
                shutil.rmtree(found, ignore_errors=True)


LOGS_ENV = "EPD_BENCH_LOGS"
"""A folder that all logs of a launch are copied to before it ends: for who looks only afterwards."""

START_S = 600.0
STOP_S = 60.0
_READY = re.compile(r"^Ready in [\d.]+ s: .* serves (\S+)$", re.MULTILINE)
_STAGE = re.compile(r"^\s+(\w+)\s+(\w+)\s+[\d,]+ .*\s(\S+\.http|\S+:\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Stage:
    """An instance as the ready message lists it. `server`: its socket's name in the run directory, or host:port."""

    instance: str
    role: str
    server: str


@dataclass(frozen=True)
class Served:
    """A layout that is ready.

    Attributes:
        name: the layout, or what its caller calls it. url: the proxy.
        ready_s: from the start of the process to its ready message;
        cpu_parts: its processes. traces: folder of the phase stamps. run: its run directory, with the stages' sockets;
        where it runs on several nodes, the folder in which each has one.
    """

    name: str
    url: str
    model: str
    cpu_parts: Parts
    ready_s: float
    stages: tuple[Stage, ...]
    traces: Path = field(compare=False)
    run: Path = field(compare=False, default=Path())

    def stage_url(self, role: str) -> str | None:
        """A stage's own server, past the proxy; None when no instance has that role."""
        return next(iter(self.stage_urls(role)), None)

    def stage_urls(self, role: str) -> list[str]:
        """Of all stages with that role, all of them on this machine."""
        return [unix_url(self.run / stage.server) for stage in self.stages if stage.role == role]


def parse_ready(text: str) -> tuple[str, tuple[Stage, ...]] | None:
    """(model, instances) of a ready message, or None while there is none in `text`."""
    ready = _READY.search(text)
    if ready is None or "Ctrl-C" not in text:
        return None
    stages = tuple(Stage(*found) for found in _STAGE.findall(text))
    return ready[1], stages


@contextlib.contextmanager
def served(
    layout: str,
    flags: Sequence[str] = (),
    *,
    name: str = "",
    traced: bool = True,
    env: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Serve `layout` until the context ends.

    Args:
        flags: what follows in `epd-serve serve`, the model's folder too. name: instead of the layout.
        traced: phase stamps are written, which costs the proxy a write per stamp. env: of the process.

    Raises:
        StageError: it ended before it was ready, or took longer than `START_S`; with the end of its log.
    """
    with scratch() as folder, contextlib.ExitStack() as stack:
        (port,) = free_ports(1)
        traces, said = folder / "traces", folder / "launcher.out"
        argv = [sys.executable, "-m", "deploy.cli", "serve", "--layout", layout, "--port", str(port)]
        argv += ["--run-root", f"{folder}/run", *(["--trace-dir", str(traces)] if traced else [])]
        argv += ["--proxy", "explain=true", *flags]
        begun = time.monotonic()
        log = folder / "launcher.log"
        launcher = stack.enter_context(started(argv, log, name=layout, out=said, env=env, stop_s=STOP_S))
        stack.callback(_keep_logs, name or layout, folder)  # before it is stopped, which removes them
        model, stages = launcher.ready(lambda: parse_ready(said.read_text(encoding="utf-8")), START_S)
        ready_s = time.monotonic() - begun
        root = folder / "run"
        runs = [found.parent for found in root.glob("*/groups.jsonl")]
        processes, run = parts(launcher.process.pid, groups(root)), runs[0] if len(runs) == 1 else root
        yield Served(name or layout, f"http://127.0.0.1:{port}", model, processes, ready_s, stages, traces, run)


@contextlib.contextmanager
def simulated(
    layout: str,
    profile: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Serve `layout` until the context ends.

    Args:
        profile: of the stages (docs/guides/simulation.md); without one they take no time for anything.
        flags: more of `epd-serve serve`. env: of its process.

    Raises:
        StageError: it did not become ready.
    """
    with scratch() as folder:
        path = folder / "profile.json"
        path.write_text(json.dumps(profile or {}), encoding="utf-8")
        with served(layout, ["--engine", "sim", "--sim-profile", str(path), *flags], traced=False, env=env) as launch:
            yield launch


def _keep_logs(name: str, folder: Path) -> None:
    kept = os.environ.get(LOGS_ENV)
    if not kept:
        return
    target = Path(kept) / re.sub(r"[^\w.()-]+", "_", name)
    target.mkdir(parents=True, exist_ok=True)
    for log in (*folder.glob("*.log"), *folder.glob("run/last-failure-*.log"), *folder.glob("run/*/*.log")):
        with contextlib.suppress(OSError):  # the launch may be ending
            shutil.copyfile(log, target / log.name)


def answers(url: str, says: str = "") -> bool:
    """Whether somebody on this machine answers at `url` with 200, and `says` in the text."""
    try:  # there is nothing to verify, and to load certificates at each look would take 20 ms of a core
        answer = httpx.get(url, timeout=5.0, trust_env=False, verify=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and says in answer.text


STAGE_BYTES = 2_500_000_000
"""Free memory per stage of the `bench` preset: its processes, KV cache and share of the arena."""


def check_memory(stages: int) -> None:
    """Raises ConfigError where so many stages at a time do not fit into what is free."""
    free = read_properties(DeviceInventory("cpu"))[0].free_bytes
    if free is not None and free < stages * STAGE_BYTES:
        raise ConfigError(
            f"{stages} stages are up at a time, which takes {stages * STAGE_BYTES / 1e9:.0f} GB of memory, and "
            f"{free / 1e9:.0f} are free: end something, or measure a part with --only",
            param="--only",
        )
