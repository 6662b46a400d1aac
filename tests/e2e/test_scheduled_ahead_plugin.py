"""The plugin's streams and events, in what vLLM's model runner makes of a step whose tokens are fetched later."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.e2e.vllm_plugin import ROOT

# As CPUModelRunner makes the stream, and sample_tokens the output.
SAMPLED = """
import torch
from tests.e2e.scheduled_ahead import register
register()
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker import cpu_model_runner
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput
with cpu_model_runner._torch_cuda_wrapper():
    stream = torch.cuda.Stream()
rows = ModelRunnerOutput(req_ids=["first", "partial"], req_id_to_index={"first": 0, "partial": 1})
sampled = torch.tensor([[7], [8]])
print(AsyncGPUModelRunnerOutput(rows, sampled, None, [1], stream, 100).get_output().sampled_token_ids)
"""


def test_tokens_fetched_after_their_step_are_those_it_sampled_but_for_unfinished_prompts() -> None:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "epd_serve" / "engine" / "site")))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", SAMPLED], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[[7], []]"
