"""Entry point of a stage process: ties its life to the launcher, then becomes vLLM's OpenAI server.

`python -m epd_serve.engine.stage_main <vLLM api_server flags>`. The console script `vllm serve` is not used because
the CPU distribution of vLLM is not named `vllm` and its script cannot find itself.
"""

from __future__ import annotations

import os
import runpy

from epd_serve.engine.memory_names import name_memory
from epd_serve.lifeline import die_with_parent
from epd_serve.stage_plan import LAUNCHER_ENV


def main() -> None:
    launcher = os.environ.get(LAUNCHER_ENV)
    if launcher is not None:
        die_with_parent(int(launcher))
    name_memory()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
