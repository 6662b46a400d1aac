"""What a stage's log says: its phase, and the one line that tells why it died. Samples are vLLM's own."""

from __future__ import annotations

import pytest

from deploy.agent.stage_log import failure_reason, phase_of

ENGINE_FAILED = """\
(EngineCore pid=411) INFO 11-21 03:44:20 [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: model='/m'
(EngineCore pid=411) ERROR 11-21 03:44:25 [core.py:1200] EngineCore failed to start.
(EngineCore pid=411) ERROR 11-21 03:44:25 [core.py:1200] Traceback (most recent call last):
(EngineCore pid=411) ERROR 11-21 03:44:25 [core.py:1200]   File "/v/core.py", line 1187, in run_engine_core
(EngineCore pid=411) ERROR 11-21 03:44:25 [core.py:1200]     raise ValueError("inner: not this line")
(EngineCore pid=411) ERROR 11-21 03:44:25 [core.py:1200] ValueError: No available memory for the cache blocks. Try more.
(EngineCore pid=411) Process EngineCore:
(APIServer pid=400) Traceback (most recent call last):
(APIServer pid=400)   File "/v/api_server.py", line 12, in <module>
(APIServer pid=400) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
REFUSED_GROUPS = (
    "1 KV groups of MambaSpec: Sliding window, hybrid KV groups, Mamba: refused where a stage sends or takes KV"
)
ENGINE_REFUSED = f"""\
(EngineCore pid=411) ERROR 11-21 03:44:25 [core.py:1200] EngineCore failed to start.
(EngineCore pid=411) ERROR 11-21 03:44:25 [core.py:1200] Traceback (most recent call last):
(EngineCore pid=411) ERROR 11-21 03:44:25 [core.py:1200] epd_serve.errors.ConfigError: {REFUSED_GROUPS}
(APIServer pid=400) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
WORKER_REFUSED = f"""\
(Worker_TP1 pid=5) ERROR 11-21 03:44:25 [multiproc_executor.py:1063] epd_serve.errors.ConfigError: {REFUSED_GROUPS}
(EngineCore pid=411) ERROR 11-21 03:44:25 [core.py:1200] RuntimeError: Worker failed with error '{REFUSED_GROUPS}', \
please check the stack trace above for the root cause
(APIServer pid=400) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
FAILED_REQUEST = """\
INFO:     Application startup complete.
ERROR:    Exception in ASGI application
Traceback (most recent call last):
  File "/v/starlette/errors.py", line 164, in __call__
    raise AssertionError("inner")

  File "/v/processor.py", line 2, in apply
AssertionError: Failed to apply prompt replacement for mm_items['image'][0]
(APIServer pid=400) INFO 11-21 03:44:20 [loggers.py:335] Engine 000: Running: 0 reqs
"""
VALIDATION = """\
Traceback (most recent call last):
  File "/v/arg_utils.py", line 3, in create_model_config
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (99999) is greater than 8192 [type=value_error, input_value=Args]
    For further information visit https://errors.pydantic.dev
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (ENGINE_FAILED, "ValueError: No available memory for the cache blocks. Try more."),
        (
            VALIDATION,
            "ValidationError: 1 validation error for ModelConfig Value error, "
            "User-specified max_model_len (99999) is greater than 8192",
        ),
        (
            "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --max-num-seq 8",
            "unrecognized arguments: --max-num-seq 8",
        ),
        ("x\nOSError: [Errno 98] Address already in use", "OSError: [Errno 98] Address already in use"),
        ("/v/bin/python: No module named vllm", "/v/bin/python: No module named vllm"),
        ("\x1b[31mERROR\x1b[0m 11-21 03:44:25 [a.py:1] KeyError: 'x'", "KeyError: 'x'"),
        ("torch.OutOfMemoryError: NPU out of memory", "OutOfMemoryError: NPU out of memory"),
        ("RuntimeError: Engine core initialization failed. See root cause above.", "RuntimeError: Engine core"),
    ],
)
def test_the_reason_is_the_root_cause_without_frames_and_prefixes(log: str, reason: str) -> None:
    assert failure_reason(log, 1).startswith(reason)


@pytest.mark.parametrize("log", [ENGINE_REFUSED, WORKER_REFUSED], ids=["one worker", "more workers"])
def test_what_is_refused_once_the_model_is_loaded_is_told_like_what_is_refused_before(log: str) -> None:
    assert REFUSED_GROUPS in failure_reason(log, 1)


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [
        (-9, "killed by SIGKILL (out of memory?)"),
        (-7, "killed by SIGBUS (is /dev/shm full?)"),
        (3, "exited with code 3"),
        (None, "did not become ready"),
    ],
)
def test_a_silent_end_is_described_by_how_it_ended(exit_code: int | None, reason: str) -> None:
    assert failure_reason("", exit_code) == reason
    assert failure_reason("last words\n\n", exit_code) == f"{reason}; its log ends with: last words"


def test_a_request_that_failed_is_not_why_the_stage_died() -> None:
    assert failure_reason(FAILED_REQUEST, 1).startswith("exited with code 1; its log ends with: Engine 000")
    died = FAILED_REQUEST + "(EngineCore pid=411) ERROR 11-21 03:44:25 [core.py:1200] ValueError: the cause\n"
    assert failure_reason(died, 1) == "ValueError: the cause"


def test_nothing_in_the_log_explains_a_sigkill() -> None:
    assert failure_reason(ENGINE_FAILED, -9).startswith("killed by SIGKILL (out of memory?)")


def test_a_reason_is_one_bounded_line() -> None:
    reason = failure_reason("ValueError: " + "long " * 1000, 1)
    assert len(reason) <= 400
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("(EngineCore pid=1) INFO [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config", "starting engine"),
        ("INFO 11-21 [gpu_model_runner.py:5040] Starting to load model /m...", "loading weights"),
        ("INFO [default_loader.py:502] Loading weights took 0.12 seconds", "profiling memory"),
        ("INFO [kv_cache_utils.py:2328] GPU KV cache size: 1,024 tokens, Maximum concurrency", "KV cache"),
        ("INFO [api_server.py:1] Starting vLLM server on http://127.0.0.1:8001", "starting API"),
        ("INFO: something else", None),
    ],
)
def test_phases_are_read_from_log_lines(line: str, phase: str | None) -> None:
    assert phase_of(line) == phase
