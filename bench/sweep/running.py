"""A deployment that serves, however it was started, and whether its instances live while a rate is measured.

Our proxy says that in its status table (`GET /instances`), which is asked several times a second, by one thread beside
the load generator: an instance that ends or is another one suddenly makes a run worthless however many of its answers
were good.

The baseline is monolithic vLLM of the installed version as it comes, one server per device, without anything of ours.
Our plugin is inert in it (it is told of no stage), no proxy stands before it: the load generator asks the servers in
turn, which costs them nothing. It has the devices that the layout `TP1xN` has, on CPU as many threads as its stages
have (bound to cores, which is vLLM's way to say how many; VLLM_CPU_OMP_THREADS_BIND says otherwise), and the same KV
cache and flags; of a stage's own only the repair of torchvision beside a CPU torch is there. On other devices vLLM's
own defaults hold; `--vllm-flags` come last. vLLM's worker queues spin between steps on CPU, for which it has no switch;
our stages have none or sleep there (docs/measuring/layouts.md).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from bench.clients.sender import realtime_priority
from bench.clients.target import Target
from bench.record import ROOT
from bench.served import answers, scratch
from bench.sweep.experiment import Deployment
from deploy.host.ports import free_ports
from deploy.host.started import Started, started
from deploy.memory.check import VISIBLE
from deploy.plan.blueprint import Blueprint
from epd_serve.cpu_threads import BIND_ENV, cpu_threads
from epd_serve.engine.argv import CPU_ARGS, CPU_KV_GIB
from epd_serve.errors import StageError
from epd_serve.placement import InstancePlan
from epd_serve.stage_work import read_stage_work

ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class StageStatus:
    """One instance as it is now.

    Attributes:
        incarnation: names the process; another one, and it was restarted.
        down: why it is not up, else "".
    """

    instance: str
    incarnation: str
    down: str = ""


@dataclass(frozen=True)
class RunningDeployment:
    """Something that serves a deployment.

    Attributes:
        target: whom to load. model: as it is called there.
        ready_s: from its start until it was ready.
        status: what its instances run now; raises StageError where nobody answers.
        traces: folder of its phase stamps, or None.
        shared_cores: its devices are virtual, and there are fewer cores than devices.
    """

    target: Target
    model: str
    ready_s: float
    status: Callable[[], Sequence[StageStatus]]
    traces: Path | None = None
    shared_cores: bool = False


def proxy_status(url: str) -> list[StageStatus]:
    """The instances of our proxy at `url`. Raises StageError where it does not answer."""
    table = Target(url).ask("/instances", limit_s=ASK_S).json()["instances"]
    why = {one["id"]: "" if one["up"] else one["reason"] or "it is down" for one in table}
    return [StageStatus(one["id"], one["incarnation"], why[one["id"]]) for one in table]


EVERY_S = 0.25
STOP_S = 30.0
"""For a question that is under way to end, which has a deadline of its own; and for a plain server."""


@dataclass
class Watched:
    """Instances that were lost while a run lasted, with what is known of it."""

    died: dict[str, str] = field(default_factory=dict)
    incarnations: dict[str, str] = field(default_factory=dict)

    def add(self, now: Sequence[StageStatus]) -> None:
        """A look at all of them."""
        for one in now:
            if one.down:
                self.died.setdefault(one.instance, one.down)
            elif self.incarnations.setdefault(one.instance, one.incarnation) != one.incarnation:
                self.died.setdefault(one.instance, "it was restarted")


@contextlib.contextmanager
def watched(status: Callable[[], Sequence[StageStatus]]) -> Iterator[Watched]:
    """Look every `EVERY_S` seconds while the context lasts, and once more at its end.

    Args:
        status: the instances now; raises StageError where nobody answers: the requests of the run say so as well.
    """
    found, over = Watched(), threading.Event()

    def watch() -> None:
        with realtime_priority():  # starved while it holds the interpreter, it would keep the generator waiting
            last = False
            while True:
                with contextlib.suppress(StageError):
                    found.add(status())
                if last:
                    return
                last = over.wait(EVERY_S)

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join(STOP_S)


START_S = 600.0
REST_S = 1.2
"""After its last step its worker looks for the next one for a second, on a core that others are measured on."""
_SITE = ROOT / "epd_serve" / "engine" / "site"


@contextlib.contextmanager
def plain_vllm(
    deployment: Deployment, blueprint: Blueprint, more_env: Mapping[str, str] = MappingProxyType({})
) -> Iterator[RunningDeployment]:
    """The servers of `deployment` until the context ends.

    Args:
        blueprint: of the layout `TP1xN`, for devices, cores and model.
        more_env: over the environment that a server would get.

    Raises:
        StageError: one ended before it was ready, or took longer than `START_S`; with the end of its log.
    """
    with scratch() as folder, contextlib.ExitStack() as stack:
        begun = time.monotonic()
        servers: dict[str, Started] = {}
        for plan, port in zip(blueprint.plans, free_ports(len(blueprint.plans)), strict=True):
            argv, env = command(deployment, blueprint, plan, port)
            log, env = folder / f"vllm{len(servers)}.log", {**env, "TMPDIR": str(folder), **more_env}
            server = started(argv, log, env=env, by=signal.SIGTERM, stop_s=STOP_S)
            servers[f"http://127.0.0.1:{port}"] = stack.enter_context(server)
        for url, one in servers.items():
            one.ready(partial(answers, f"{url}/health"), START_S)
        yield RunningDeployment(
            target=Target(list(servers)),
            model=blueprint.served_model_name,
            ready_s=time.monotonic() - begun,
            status=lambda: [_status(url, one) for url, one in servers.items()],
            shared_cores=blueprint.cores is not None and blueprint.cores.oversubscribed,
        )


def _status(url: str, server: Started) -> StageStatus:
    if (code := server.process.poll()) is not None:
        return StageStatus(server.name, "", f"it ended with {code}")
    Target(url).ask("/health", limit_s=ASK_S)
    return StageStatus(server.name, str(server.process.pid))


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
        threads = cpu_threads(read_stage_work(Path(blueprint.model)), plan.role, blueprint.cores_of(plan), plan.tp)
        ranks = [threads.cores[rank * threads.count :][: threads.count] or threads.cores for rank in range(plan.tp)]
        bound = "|".join(",".join(map(str, cores)) for cores in ranks)
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_GIB), BIND_ENV: os.environ.get(BIND_ENV) or bound}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SITE), os.environ.get("PYTHONPATH")]))
        argv += CPU_ARGS
    else:
        env[VISIBLE[blueprint.device]] = ",".join(map(str, plan.devices))
    return [*argv, *deployment.flags], env
