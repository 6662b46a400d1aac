"""A launch of the product, as a user starts it, and the plain vLLM it is held against."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.agent.template import api_server_of
from deploy.host import processes
from deploy.host.ports import free_ports
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.endpoint import unix_url
from epd_serve.engine.template.messages import TEMPLATE_NAME
from tests.stage_http import stage_client
from tests.waiting import wait_for

START_S = 420.0
STOP_S = 15.0  # the promise: everything ends within this
ROOT = Path(__file__).resolve().parents[2]
MODEL = "epd-demo"
PATIENT = "timeouts.instance_wait_s=170"
"""Not the product's 60 s: a stage that was killed is back after 25 to 44 s on two cores, and later when several come
back at once beside other work. Below the clients' 180 s, so that what takes longer ends with the proxy's own answer."""
# The plain monolith gets the flags that every stage gets on CPU, so that both compute the same.
PLAIN_FLAGS = (
    *("--limit-mm-per-prompt", '{"image": 8, "video": 0}'),
    *("--enforce-eager", "--block-size", "32", "--max-num-seqs", "32"),
)


def shared_memory(launch_id: str) -> list[Path]:
    """What lies in /dev/shm of a launch: the arena, staging memory, what its stages made, and their semaphores."""
    return [path for start in ("", "sem.") for path in Path("/dev/shm").glob(f"{start}epd-{launch_id}-*")]


def recomputed(counters: dict[str, int]) -> int:
    """How many features an instance encoded itself because they were lost."""
    return sum(count for name, count in counters.items() if name.startswith("recomputed."))


@dataclass
class Endpoint:
    """An OpenAI endpoint: the proxy's, a stage's, or plain vLLM's."""

    url: str
    ready_path = "/health"
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=180))

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=body, **kwargs)

    def metric(self, name: str) -> float:
        """A metric summed over its labels, or one series of it, named with its labels; 0 where there is none."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def answers(self, body: dict[str, Any]) -> bool:
        try:
            return self.post("/v1/chat/completions", body).status_code == 200
        except httpx.HTTPError:
            return False

    def healthy(self) -> bool:
        try:
            return self.get(self.ready_path).status_code == 200
        except httpx.HTTPError:
            return False


class Serving(Endpoint):
    """`epd-serve serve` in a process of its own, with a run root of its own."""

    ready_path = "/ready?all"  # its /health is 200 while anything is served; tests count on all of it

    def __init__(self, layout: str, *flags: str) -> None:
        (port,) = free_ports(1)
        super().__init__(f"http://127.0.0.1:{port}")
        self.layout = layout
        self.port = port
        self.root = Path(tempfile.mkdtemp(prefix="epd-e2e-", dir="/tmp"))
        self.log = self.root / "launcher.log"
        argv = [sys.executable, "-m", "deploy.cli", "serve", "--layout", layout, "--device", "cpu"]
        argv += ["--port", str(port), "--run-root", str(self.root / "run"), "--proxy", PATIENT]
        argv += ["--proxy", "explain=true", *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self, start_s: float = START_S) -> Serving:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"launch {self.layout} ended:\n{self.log.read_text()[-3000:]}")
            return self.healthy()

        wait_for(ready, f"{self.layout} to be ready", start_s)
        return self

    @property
    def run(self) -> Path:
        """The run directory of this launch."""
        (path,) = [path for path in (self.root / "run").iterdir() if (path / "launcher.json").exists()]
        return path

    @property
    def launch_id(self) -> str:
        return self.run.name

    def shared_memory(self) -> list[Path]:
        return sorted(shared_memory(self.launch_id))

    def instances(self) -> dict[str, dict[str, Any]]:
        return {entry["id"]: entry for entry in self.get("/instances").json()["instances"]}

    def counters(self, instance: str) -> dict[str, int]:
        """What the instance last reported of the MM Store, twice a second; nothing before its first report."""
        report = self.instances()[instance]["store"] or {"counters": {}}
        counters: dict[str, int] = report["counters"]
        return counters

    def settled_counters(self, instance: str) -> dict[str, int]:
        """The same, with all that has happened until now: after two more reports, whole ones begun since."""

        def reports() -> int:
            return int((self.instances()[instance]["store"] or {"seq": 0})["seq"])

        first = reports()
        wait_for(lambda: reports() >= first + 2, f"{instance} to report of the MM Store", 15)
        return self.counters(instance)

    def recomputed(self, instance: str) -> int:
        return recomputed(self.counters(instance))

    def stage(self, instance: str) -> Endpoint:
        """A stage's own server, past the proxy."""
        return Endpoint("http://localhost", client=stage_client(unix_url(self.run / f"{instance}.http"), 180))

    def stage_pid(self, instance: str) -> int:
        """Leader of the instance's newest process group: its root."""
        lines = (self.run / "groups.jsonl").read_text().splitlines()
        return int([entry for entry in map(json.loads, lines) if entry["instance"] == instance][-1]["pid"])

    def api_server_pid(self, instance: str) -> int:
        return api_server_of(self.stage_pid(instance))

    @property
    def template_pid(self) -> int:
        """The process that stages are forked from: by its name, because its forks have its arguments and parent."""

        def named() -> int:
            children = (one for one in processes.running() if one.parent == self.process.pid)
            return next((child.pid for child in children if child.name == TEMPLATE_NAME), 0)

        return int(wait_for(named, "a template"))

    @contextlib.contextmanager
    def slow_restarts(self) -> Iterator[None]:
        """A stage that dies stays away for half a minute: nobody answers who could fork it."""
        os.kill(template := self.template_pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # the launcher has another by now
                os.kill(template, signal.SIGCONT)

    def signal_stage(self, instance: str, number: int) -> None:
        """To every process of the instance but its resource trackers, which have to unlink vLLM's shared memory."""
        for member in processes.group_members(self.stage_pid(instance)):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if b"resource_tracker" not in Path(f"/proc/{member.pid}/cmdline").read_bytes():
                    os.kill(member.pid, number)

    def stage_log(self, instance: str) -> str:
        return (self.run / f"{instance}.log").read_text(errors="replace")

    def kv_blocks_in_use(self, instance: str) -> float:
        """vLLM's own KV cache usage, 0 … 1."""
        return self.stage(instance).metric("vllm:kv_cache_usage_perc")

    def requests_inside(self, instance: str) -> float:
        stage = self.stage(instance)
        return stage.metric("vllm:num_requests_running") + stage.metric("vllm:num_requests_waiting")

    def stop(self) -> None:
        """Ctrl-C, and the promise that nothing remains."""
        run, ours = self.run, self._group_pids()
        self.process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        code = self.process.wait(timeout=STOP_S + 30)
        took = time.monotonic() - begun
        assert code == 0, f"exit code {code}:\n{self.log.read_text()[-2000:]}"
        assert took <= STOP_S, f"the end took {took:.1f} s"
        self.assert_nothing_left(run, ours)

    def assert_nothing_left(self, run: Path, groups: list[int]) -> None:
        assert not [group for group in groups if processes.group_members(group)], "processes remain"
        assert not shared_memory(run.name), "shared memory remains"
        assert not run.exists(), "the run directory remains"
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0, "the port is still open"

    def destroy(self) -> None:
        """For tests that failed: leave nothing, whatever state it is in."""
        groups = self._group_pids()
        for group in [self.process.pid, *groups]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        with contextlib.suppress(ValueError, FileNotFoundError):
            for path in self.shared_memory():
                path.unlink()
        shutil.rmtree(self.root, ignore_errors=True)

    def _group_pids(self) -> list[int]:
        with contextlib.suppress(ValueError, FileNotFoundError):
            return [json.loads(line)["pid"] for line in (self.run / "groups.jsonl").read_text().splitlines()]
        return []


@contextlib.contextmanager
def serving(layout: str, *flags: str) -> Iterator[Serving]:
    """A ready launch; at the end Ctrl-C with all its promises checked."""
    launch = Serving(layout, *flags)
    try:
        yield launch.wait_ready()
        if launch.process.poll() is None:
            launch.stop()
    finally:
        launch.destroy()


@contextlib.contextmanager
def plain_vllm(model: Path | None = None, *flags: str) -> Iterator[Endpoint]:
    """A monolithic vLLM server without anything of ours, over the demo model unless another is given."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model or builtin_model_dir())]
    argv += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), *PLAIN_FLAGS, *flags]
    site = str(ROOT / "epd_serve" / "engine" / "site")
    env = {**os.environ, "PYTHONPATH": site, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            argv, cwd="/", env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        endpoint = Endpoint(f"http://127.0.0.1:{port}")
        try:

            def ready() -> bool:
                if process.poll() is not None:
                    log.seek(0)
                    raise AssertionError(f"plain vLLM ended:\n{log.read().decode()[-3000:]}")
                return endpoint.healthy()

            wait_for(ready, "plain vLLM to be ready", START_S)
            yield endpoint
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            killing = processes.Killing()
            deadline = time.monotonic() + 10
            while (members := processes.group_members(process.pid)) and time.monotonic() < deadline:
                killing.strike([member.pid for member in members])
                time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
