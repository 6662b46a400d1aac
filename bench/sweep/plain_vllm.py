"""The baseline: monolithic vLLM of the installed version as it comes, one server per device, without anything of ours.

Our plugin is inert in it (it is told of no stage), no proxy stands before it: the load generator asks the servers in
turn, which costs them nothing. It has the devices that the layout `TP1xN` has, on CPU the same core binding, KV cache
and flags; of a stage's own only the repair of torchvision beside a CPU torch is there. On other devices vLLM's own
defaults hold; `--vllm-flags` come last.

vLLM's worker queues spin between steps on CPU, for which it has no switch; our stages sleep there
(docs/measuring/layouts.md).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from bench.clients.target import Target
from bench.record import ROOT
from bench.scratch import scratch
from bench.sweep.deployments import Deployment
from bench.sweep.running import RunningDeployment, StageStatus, server_status
from deploy.blueprint import Blueprint
from deploy.memory_check import VISIBLE
from deploy.parent_death_exec import parent_death_exec
from deploy.ports import free_ports
from deploy.processes import group_members
from epd_serve.engine.argv import CPU_ARGS, CPU_KV_GIB
from epd_serve.errors import StageError
from epd_serve.placement import InstancePlan

START_S = 600.0
STOP_S = 30.0
TRACKER_S = 10.0
LOOK_EVERY_S = 0.2
_SITE = ROOT / "epd_serve" / "engine" / "site"


@contextlib.contextmanager
def plain_vllm(deployment: Deployment, blueprint: Blueprint) -> Iterator[RunningDeployment]:
    """The servers of `deployment` until the context ends.

    Args:
        blueprint: of the layout `TP1xN`, for devices, cores and model.

    Raises:
        StageError: one ended before it was ready, or took longer than `START_S`; with the end of its log.
    """
    with scratch() as folder, contextlib.ExitStack() as stack:
        begun = time.monotonic()
        plans, ports = blueprint.plans, free_ports(len(blueprint.plans))
        servers = []
        for at, (plan, port) in enumerate(zip(plans, ports, strict=True)):
            argv, env = command(deployment, blueprint, plan, port)
            servers.append(_Server(f"vllm{at}", port, folder / f"vllm{at}.log", argv, env))
            stack.callback(end, servers[-1].process)
        for server in servers:
            server.wait_ready(begun + START_S)
        yield RunningDeployment(
            target=Target([server.url for server in servers]),
            model=blueprint.served_model_name,
            ready_s=time.monotonic() - begun,
            status=lambda: [server.status() for server in servers],
            shared_cores=blueprint.cores is not None and blueprint.cores.oversubscribed,
        )


class _Server:
    """One server, started."""

    def __init__(self, name: str, port: int, log: Path, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.name, self.url, self._log = name, f"http://127.0.0.1:{port}", log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *parent_death_exec(argv, signal.SIGTERM)],
                cwd=ROOT,
                env={**env, "TMPDIR": str(log.parent)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_ready(self, deadline: float) -> None:
        while not self._healthy():
            code = self.process.poll()
            if code is not None or time.monotonic() > deadline:
                why = (
                    f"is not ready after {START_S:.0f} s" if code is None else f"ended with {code} before it was ready"
                )
                tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise StageError(f"{self.name} {why}:\n{tail}", stage=self.name)
            time.sleep(LOOK_EVERY_S)

    def status(self) -> StageStatus:
        if (code := self.process.poll()) is not None:
            return StageStatus(self.name, "EPD", "", f"it ended with {code}")
        return server_status(self.url, self.name, str(self.process.pid))

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


def command(
    deployment: Deployment, blueprint: Blueprint, plan: InstancePlan, port: int
) -> tuple[list[str], dict[str, str]]:
    """argv and environment of one server. Pure but for our own environment."""
    if blueprint.config.engine == "sim":
        argv = [sys.executable, "-P", "-m", "epd_serve.sim", "--role", "EPD", "--port", str(port)]
        argv += ["--model", blueprint.model, "--served-model-name", blueprint.served_model_name]
        argv += [*(["--profile", blueprint.sim_profile] if blueprint.sim_profile else []), *deployment.flags]
        return argv, {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", blueprint.model]
    argv += ["--served-model-name", blueprint.served_model_name, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--tensor-parallel-size", str(plan.tp), "--disable-uvicorn-access-log"]
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_HOST_IP": "127.0.0.1"}
    if Path(blueprint.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if blueprint.device == "cpu":
        cores = ",".join(map(str, blueprint.cores_of(plan)))
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": cores}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SITE), os.environ.get("PYTHONPATH")]))
        argv += CPU_ARGS
    else:
        env[VISIBLE[blueprint.device]] = ",".join(map(str, plan.devices))
    return [*argv, *deployment.flags], env


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, time to end, then SIGKILL to whatever is left of its group.

    The last of a group is Python's resource tracker, which takes its shared memory out of /dev/shm.
    """
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    deadline = time.monotonic() + TRACKER_S
    while group_members(process.pid) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    deadline = time.monotonic() + STOP_S
    while group_members(process.pid) and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)
    process.wait(STOP_S)
