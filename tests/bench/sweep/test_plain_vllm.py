"""The baseline's command: vLLM as it comes, with the cores and flags of a stage of ours, and nothing else of ours."""

from __future__ import annotations

import json
import shlex

from bench.sweep.experiment import deployments
from bench.sweep.running import command
from deploy.options.config import DeployConfig
from deploy.plan.blueprint import draw
from epd_serve.cpu_threads import CPU_THREADS_ENV, CpuThreads
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.engine.argv import CACHE_EVENTS, STAGE_ENV, WORKER_IN_ENGINE, stage_command
from tests.deploy.wired import Wired


def drawn(engine: str = "vllm"):
    model = str(builtin_model_dir()) if engine == "vllm" else ""
    return draw(DeployConfig(model=model, layout="TP1x2", device="cpu", engine=engine))


def test_a_plain_server_has_the_cores_and_the_flags_of_a_monolith_of_ours(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    blueprint = drawn()
    (deployment,) = [one for one in deployments("TP1x2", vllm=True, vllm_flags=("--dtype", "float32")) if one.baseline]
    for at, plan in enumerate(blueprint.plans):
        argv, env = command(deployment, blueprint, plan, 21000 + at)
        ours = stage_command(Wired(blueprint).stage(plan.id))

        assert env["VLLM_CPU_KVCACHE_SPACE"] == ours.env["VLLM_CPU_KVCACHE_SPACE"]
        bound, threads = (
            env["VLLM_CPU_OMP_THREADS_BIND"].split(","),
            CpuThreads(**json.loads(ours.env[CPU_THREADS_ENV])),
        )
        assert len(bound) == threads.count and set(map(int, bound)) <= set(threads.cores)
        added = {"epd_serve.engine.stage_main", *words_of("--scheduler-cls", ours.argv), "--scheduling-policy"}
        added |= {*WORKER_IN_ENGINE, *CACHE_EVENTS, *words_of("--logits-processors", ours.argv)}
        added |= {*words_of("--uds", ours.argv)}  # it answers on a port
        left = [word for word in ours.argv if word not in added and word != "priority"]
        assert [word for word in left if word not in argv] == []
        ours_in = [word for word in argv if word.startswith("epd")]  # the paths in it may be anything
        assert STAGE_ENV not in env and ours_in == []
        assert shlex.join(argv).endswith("--dtype float32")


def test_its_threads_are_bound_as_the_user_says(monkeypatch):
    blueprint = drawn()
    deployment = next(one for one in deployments("TP1x2", vllm=True) if one.baseline)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    _, env = command(deployment, blueprint, blueprint.plans[0], 1234)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def words_of(flag, argv):
    at = argv.index(flag)
    return argv[at : at + 2]


def test_beside_simulated_stages_it_is_simulated_too():
    blueprint = drawn("sim")
    deployment = next(one for one in deployments("TP1x2", vllm=True) if one.baseline)

    argv, _ = command(deployment, blueprint, blueprint.plans[0], 1234)
    assert argv[argv.index("-m") + 1] == "epd_serve.sim" and argv[argv.index("--role") + 1] == "EPD"
