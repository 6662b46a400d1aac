"""Entry point of a stage process: ties its life to the launcher, then becomes vLLM's OpenAI server.

`python -m epd_serve.engine.stage_main <vLLM api_server flags>`. The console script `vllm serve` is not used because
the CPU distribution of vLLM is not named `vllm` and its script cannot find itself.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys

from epd_serve.engine import compat
from epd_serve.engine.memory_names import name_memory
from epd_serve.engine.support import check_stage
from epd_serve.engine.worker_threads import leave_cores_to_workers
from epd_serve.errors import ConfigError
from epd_serve.lifeline import die_with_parent
from epd_serve.stage_plan import LAUNCHER_ENV

SERVER = "vllm.entrypoints.openai.api_server"
REFUSED = 2  # exit code: the flags have to change, starting it again is of no use


def main() -> None:
    launcher = os.environ.get(LAUNCHER_ENV)
    if launcher is not None:
        die_with_parent(int(launcher))
    sys.exit(serve())


def serve() -> int:
    """Be vLLM's OpenAI server with the flags in `sys.argv`, until it ends. Returns the exit code."""
    name_memory()
    leave_cores_to_workers()
    _check_what_is_made()
    try:
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    except ConfigError as error:
        print(f"epd-serve: error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    return 0


def _check_what_is_made() -> None:
    """Hold vLLM's configuration against the table of what we support, as soon as vLLM has made it from the flags."""
    from vllm.engine.arg_utils import EngineArgs

    make = EngineArgs.create_engine_config

    @functools.wraps(make)
    def create_engine_config(self: EngineArgs, *args: object, **more: object) -> object:
        compat.finish_requests_at_end(self)
        config = make(self, *args, **more)
        check_stage(config)
        return config

    EngineArgs.create_engine_config = create_engine_config


if __name__ == "__main__":
    main()
