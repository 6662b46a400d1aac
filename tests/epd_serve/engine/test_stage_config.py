"""What vLLM makes of the command line of each role: its own configuration, read in the vLLM that is installed.

On a platform that would capture graphs, which the CPU's is made to look like: graphs are decided before a device is
asked. And one stage really started, to see it refuse.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.stage_log import failure_reason
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.engine.argv import stage_command
from epd_serve.engine.stage_main import REFUSED
from epd_serve.roles import Role
from epd_serve.stage_plan import StagePlan
from epd_serve.wiring import StageWiring

ROOT = Path(__file__).resolve().parents[3]
START_S = 300.0

MAKE = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
from epd_serve.engine.support import check_stage
from epd_serve.errors import ConfigError

def defaults(cls, config):
    config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"
    config.cache_config.block_size = config.cache_config.block_size or 16

def made(words):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    try:
        check_stage(config)
        refused = None
    except ConfigError as error:
        refused = str(error)
    return {"mode": config.compilation_config.cudagraph_mode.name, "refused": refused}

platform = type(current_platform)
platform.support_static_graph_mode = classmethod(lambda cls: True)
platform.is_sleep_mode_available = classmethod(lambda cls: True)
platform.check_and_update_config = classmethod(defaults)
print(json.dumps({name: made(words) for name, words in json.load(sys.stdin).items()}))
"""

MODE = '{"cudagraph_mode": "%s"}'
FLAGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "eager": ("--enforce-eager",),
    "decode only": ("--compilation-config", MODE % "FULL_DECODE_ONLY"),
    "pieces": ("--compilation-config", MODE % "PIECEWISE"),
    "full": ("--compilation-config", MODE % "FULL"),
    "not compiled": ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'),
    "ngram": ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'),
    "lora": ("--enable-lora",),
    "fp8": ("--kv-cache-dtype", "fp8"),
    "scales in the cache": ("--kv-cache-dtype", "int8_per_token_head"),
    "sleep": ("--enable-sleep-mode",),
    "stages of layers": ("--pipeline-parallel-size", "2"),
}
ALONE = {**FLAGS, "offloads": ("--kv-offloading-size", "1")}  # where vLLM has no connector of ours to replace
SAID = {  # of a stage that sends KV
    "full": "--compilation-config cudagraph_mode FULL: ",
    "lora": "--enable-lora: LoRA: ",
    "scales in the cache": "--kv-cache-dtype int8_per_token_head: ",
    "sleep": "--enable-sleep-mode: Sleep mode: ",
    "stages of layers": "--pipeline-parallel-size 2: ",
}
ROLES = (Role.P, Role.D, Role.PD, Role.EPD)


def plan(role: Role, *flags: str, device: str = "cuda") -> StagePlan:
    """Of a stage over the demo model, with what its role adds; nothing of it listens."""
    wiring = StageWiring("X0", role, "1", arena="/nowhere" if role.takes_features else "")
    more: dict[str, Any] = {"device_ids": (0,), "cores": (), "tp": 1, "port": 1, "host": "127.0.0.1"}
    model = {"model": str(builtin_model_dir()), "served_model_name": "m"}
    return StagePlan(instance="X0", role=role, device=device, wiring=wiring, extra_args=flags, **model, **more)


def environment() -> dict[str, str]:
    site = str(ROOT / "epd_serve/engine/site")
    return {**os.environ, "PYTHONPATH": site, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def configurations() -> dict[tuple[Role, str], dict[str, Any]]:
    """What became of each role's flags: the mode of graphs, and the line of who refuses."""
    names = {
        f"{role} {name}": (role, name)
        for role in ROLES
        for name in (FLAGS if role.sends_kv or role.takes_kv else ALONE)
    }
    words = {text: stage_command(plan(role, *ALONE[name])).argv[3:] for text, (role, name) in names.items()}
    argv = [sys.executable, "-c", MAKE]
    given = json.dumps(words)
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(), input=given, capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {names[text]: made for text, made in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("role", ROLES)
def test_no_role_is_forced_to_piecewise_graphs(configurations: Any, role: Role) -> None:
    wanted = {
        "plain": "FULL_AND_PIECEWISE",  # full in steps of decodes alone; prefill steps in pieces, with hooks between
        "decode only": "FULL_DECODE_ONLY",  # prefill steps without graphs
        "not compiled": "FULL_DECODE_ONLY",
        "pieces": "PIECEWISE",
        "eager": "NONE",
    }
    assert {name: configurations[role, name]["mode"] for name in wanted} == wanted
    assert {configurations[role, name]["refused"] for name in wanted} == {None}


def test_who_sends_layer_by_layer_refuses_graphs_of_prefill_steps(configurations: Any) -> None:
    assert configurations[Role.P, "full"]["refused"].startswith("--compilation-config cudagraph_mode FULL: ")
    assert configurations[Role.P, "full"]["mode"] == "FULL"
    assert [configurations[role, "full"]["refused"] for role in ROLES[1:]] == [None, None, None]


@pytest.mark.parametrize("name", FLAGS)
def test_vllms_own_flags_are_refused_by_name_where_kv_is_sent(configurations: Any, name: str) -> None:
    refused = configurations[Role.P, name]["refused"]
    assert (refused or "").startswith(SAID[name]) if name in SAID else refused is None


@pytest.mark.parametrize("name", ALONE)
def test_a_monolith_may_do_what_vllm_does(configurations: Any, name: str) -> None:
    assert configurations[Role.EPD, name]["refused"] is None


def test_a_stage_that_is_refused_ends_before_it_loads_a_model_with_one_line() -> None:
    command = stage_command(plan(Role.P, "--enable-lora", device="cpu"))
    done = subprocess.run(
        command.argv,
        cwd=ROOT,
        env={**environment(), **command.env, "VLLM_LOGGING_LEVEL": "INFO"},
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == REFUSED, done.stderr[-3000:]
    said = [line for line in done.stderr.splitlines() if "epd-serve: error: " in line]
    assert len(said) == 1 and "epd-serve: error: --enable-lora: LoRA: refused where a stage " in said[0]
    assert failure_reason(done.stderr, done.returncode).startswith("--enable-lora: LoRA: "), "what the launcher tells"
    assert "Traceback" not in done.stderr
    assert "Starting to load model" not in done.stdout + done.stderr
