"""The command that starts one stage: vLLM's OpenAI server with our connectors. Values in and out, no vLLM; what
it reads is the model's config.json, for the number of threads.

What is the same everywhere stands first, then what the role adds, then what the device adds, then the operator's own
flags, which come last and therefore win.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from epd_serve.answer_flags import answer_flags
from epd_serve.cpu_threads import BIND_ENV, COUNT_ENV, CPU_THREADS_ENV, NOT_BY_VLLM, WAIT_ENV, cpu_threads
from epd_serve.engine.stage_guard import KEY_ENV
from epd_serve.instances import KEEP_ALIVE_S
from epd_serve.roles import Role
from epd_serve.stage_plan import MEMORY_NAMES_ENV, StageCommand, StagePlan
from epd_serve.stage_work import read_stage_work
from npu_ops import mps

WIRING_ENV = "EPD_SERVE_WIRING"
"""The stage's wiring as JSON. By the environment because a monolith has no connector whose config could carry it, and
because vLLM's `additional_config` is part of what names its compile cache, in which an incarnation has no business."""

STAGE_ENV = "EPD_SERVE_STAGE"  # set in every process of a stage; our vLLM plugin is inert without it
CORE_SHARE_ENV = "EPD_SERVE_CORE_SHARE"
"""The stage's `CoreOrder` as JSON, where it has a share: its workers carry it out (`core_share.py`)."""

OTLP_PROTOCOL_ENV, SERVICE_ENV = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SERVICE_NAME"
"""Of OpenTelemetry, read when vLLM makes its exporter, in each process of a stage."""

CACHE_EVENTS = ("--kv-events-config", json.dumps({"enable_kv_cache_events": True, "publisher": "null"}))
"""vLLM notes what enters and leaves its prefix cache, and sends it nowhere: our scheduler takes it (`cache_events`)."""

BYTE_HASHES_ENV = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"  # "0": events name blocks by their whole hash

STAGE_MODULE = "epd_serve.engine.stage_main"
FORCED_TOKENS = "epd_serve.engine.forced_tokens:ForcedTokens"

SHARED_CORES_ENV = "EPD_SERVE_SHARED_CORES"  # set where the cores a stage waits on are those another computes on

CPU_KV_GIB = 1  # of each worker's KV cache, where no flag says how much
CPU_KV_BYTES = CPU_KV_GIB << 30
CPU_KV_ENV = "VLLM_CPU_KVCACHE_SPACE"
KV_BYTES = "--kv-cache-memory-bytes"
"""Over which the variable would win: it is not set beside it."""

# Video off: profiling a worst-case clip takes minutes on CPU. `--stage-args` can switch it on.
CPU_ARGS = (
    *("--limit-mm-per-prompt", json.dumps({"image": 8, "video": 0})),
    *("--enforce-eager", "--block-size", "32", "--max-num-seqs", "32"),
)

WORKER_IN_ENGINE = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""A single worker inside EngineCore's process: two messages and two wake-ups a step less, and a process less. vLLM has
it so on every platform but CPU, where its workers get their OpenMP threads by their environment; ours do not
(`worker_threads.py`). It replaces the name `uni` there, not the class."""

# No KV cache and no language model. vLLM 0.28 derives that from the sole role ec_producer, 0.23 has to be told.
ENCODER_ARGS = ("--mm-encoder-only", "--no-enable-prefix-caching", "--enforce-eager")

# Requests are logged for one line, which says when the engine got one; the middleware keeps it out of the log.
TRACE_ARGS = ("--middleware", "epd_serve.engine.request_trace.RequestTrace", "--enable-log-requests")

HCCL_PORTS_ENV = ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
"""`auto`: the system chooses. Otherwise ranks of all stages of a card meet at one port (CANN, "HCCL environment")."""

SHARED_NPU_SETTINGS = {"enable_cpu_binding": False}
"""Of vllm-ascend, which otherwise binds all stages of an NPU to the same cores."""

V2_RUNNER_ENV = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM 0.32 chooses its second model runner on CUDA by itself; no card has run our connectors under it."""

_VISIBLE_DEVICES = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
_SITE = Path(__file__).with_name("site")

OF_A_STAGE_ENV = frozenset((
    *(STAGE_ENV, WIRING_ENV, CORE_SHARE_ENV, MEMORY_NAMES_ENV, KEY_ENV, SERVICE_ENV, "VLLM_HOST_IP"),
    BYTE_HASHES_ENV,
    *(COUNT_ENV, BIND_ENV, CPU_THREADS_ENV, mps.PERCENTAGE_ENV, *_VISIBLE_DEVICES.values()),
    *(*HCCL_PORTS_ENV, CPU_KV_ENV),
))  # fmt: skip
"""Names of the environment in which stages of one launch may differ: nothing reads them at import, or a fork makes up
for it. All others have to be the same in all stages, because they are forked from one process."""


def stage_command(plan: StagePlan) -> StageCommand:
    """Lower a plan to the command that starts it."""
    return StageCommand(
        argv=(
            sys.executable,
            "-m",
            STAGE_MODULE,
            *_common(plan),
            *_role(plan),
            *_device(plan),
            *plan.extra_args,
        ),
        env=_environment(plan),
    )


def _common(plan: StagePlan) -> list[str]:
    reports = bool(plan.wiring.load_publish)
    return [
        *("--model", plan.model),
        *("--served-model-name", plan.served_model_name),
        *(("--uds", plan.uds) if plan.uds else ("--host", plan.host, "--port", str(plan.port))),
        *("--tensor-parallel-size", str(plan.tp)),
        "--disable-uvicorn-access-log",
        *(("--scheduler-cls", "epd_serve.engine.status.scheduler.ReportingScheduler") if reports else ()),
        *(CACHE_EVENTS if reports and plan.role.has_language_model else ()),
        # Text overtakes a burst of pictures only where vLLM orders its queue by priority; all equal, it is by arrival.
        *(("--scheduling-policy", "priority") if plan.role.has_language_model else ()),
        *(TRACE_ARGS if plan.wiring.trace_path else ()),
        *(("--otlp-traces-endpoint", plan.wiring.otlp_traces_endpoint) if plan.wiring.otlp_traces_endpoint else ()),
        *(("--middleware", "epd_serve.engine.stage_guard.StageGuard") if plan.guarded else ()),  # last: the outermost
    ]


def _role(plan: StagePlan) -> list[str]:
    role, wiring, extra = plan.role, plan.wiring, {"epd": plan.wiring.to_json()}
    args: list[str] = []
    if (role.decodes or wiring.takes_kv) and answer_flags(plan.extra_args) is not None:
        args += ["--logits-processors", FORCED_TOKENS]
    if role.sends_features:
        args += ENCODER_ARGS
    if (role.sends_features or role.takes_features) and plan.wiring.arena:
        config = {
            "ec_connector": "FeatureConnector",
            "ec_connector_module_path": "epd_serve.engine.ec.connector",
            "ec_role": "ec_producer" if role.sends_features else "ec_consumer",
            "engine_id": f"{plan.instance}-{plan.wiring.incarnation}",
            "ec_connector_extra_config": extra,
        }
        args += ["--ec-transfer-config", json.dumps(config)]
    if wiring.sends_kv or wiring.takes_kv:
        config = {
            "kv_connector": "GroupedKVConnector",
            "kv_connector_module_path": "epd_serve.engine.kv.connector",
            "kv_role": "kv_both" if wiring.both else "kv_producer" if role.sends_kv else "kv_consumer",
            "engine_id": f"{plan.instance}-{plan.wiring.incarnation}",
            # `recompute` would kill a D that has no feature for the request: the proxy retries instead.
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }
        args += ["--kv-transfer-config", json.dumps(config)]
    return args


def _device(plan: StagePlan) -> list[str]:
    if plan.device == "cpu":
        return [*CPU_ARGS, *(WORKER_IN_ENGINE if plan.tp == 1 and plan.cores else ())]
    args = []
    share = plan.memory_share
    if share is None and plan.role.sends_features:
        share = 0.01  # no KV cache: the tower's weights and activations are taken outside vLLM's budget
    elif share is None and plan.colocated > 1:
        share = round(0.85 / plan.colocated, 3)
    if share is not None:
        args += ["--gpu-memory-utilization", str(share)]
    if plan.kv_cache_bytes is not None:
        # Neighbours allocate and free while this one is profiled; told its KV cache, it does not look at them.
        args += [KV_BYTES, str(plan.kv_cache_bytes)]
    if plan.device == "npu" and plan.colocated > 1 and not _sets_additional_config(plan.extra_args):
        args += ["--additional-config", json.dumps(SHARED_NPU_SETTINGS)]
    return args


def _sets_additional_config(words: Sequence[str]) -> bool:
    """Whether the operator gives vllm-ascend's settings; a second flag would replace the first."""
    names = (word.split("=")[0].split(".")[0].replace("_", "-") for word in words)
    return "--additional-config" in names


def _environment(plan: StagePlan) -> dict[str, str]:
    env = {STAGE_ENV: plan.instance, "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(KEEP_ALIVE_S)
    env["VLLM_HOST_IP"] = plan.host  # vLLM's own queues bind where the stage does, not on the first interface found
    if plan.memory_names:
        env[MEMORY_NAMES_ENV] = plan.memory_names
    if plan.wiring.load_publish or plan.wiring.trace_path:
        env[WIRING_ENV] = json.dumps(plan.wiring.to_json())
    if CACHE_EVENTS[0] not in plan.extra_args:  # an operator's own listener gets them as he expects them
        env[BYTE_HASHES_ENV] = "0"
    if plan.wiring.otlp_traces_endpoint:
        env[OTLP_PROTOCOL_ENV] = "http/protobuf"  # as the front doors; vLLM's own choice is gRPC
        env[SERVICE_ENV] = f"epd-serve-{plan.instance}"
    if plan.core_order is not None:
        env[CORE_SHARE_ENV] = plan.core_order.to_json()
        if plan.device == "cuda" and plan.core_order.enforced:
            env[mps.PERCENTAGE_ENV] = mps.percentage(plan.core_order.share)
    if Path(plan.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if plan.device == "cpu":
        env["PYTHONPATH"] = str(_SITE)
        env[SHARED_CORES_ENV] = "1"
        if not any(word.split("=")[0].replace("_", "-") == KV_BYTES for word in plan.extra_args):
            env[CPU_KV_ENV] = str(CPU_KV_GIB)
        env[WAIT_ENV] = "PASSIVE"  # threads that spin for work take the cores from whoever has some
        env[BIND_ENV] = NOT_BY_VLLM if plan.cores else "auto"
        if plan.cores:
            env[CPU_THREADS_ENV] = cpu_threads(
                read_stage_work(Path(plan.model)), Role.PD if plan.wiring.both else plan.role, plan.cores, plan.tp
            ).to_json()
    else:
        env[_VISIBLE_DEVICES[plan.device]] = ",".join(map(str, plan.device_ids))
    if plan.device == "npu" and plan.colocated > 1 and plan.tp > 1:
        env |= dict.fromkeys(HCCL_PORTS_ENV, "auto")
    if plan.device == "cuda":
        env[V2_RUNNER_ENV] = "0"
    return env
