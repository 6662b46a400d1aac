"""Real stages get the KV cache that was computed for them before they started."""

from __future__ import annotations

import re

import pytest

from deploy.memory.preview import preview
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.layout_parser import parse
from tests.e2e.serving import Serving

LAYOUT = "(E-P)-D"
CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


@pytest.mark.slow
@pytest.mark.parametrize("launch", [LAYOUT], indirect=True)
def test_vllm_makes_of_the_planned_memory_as_many_blocks_as_were_computed(launch: Serving) -> None:
    _, planned = preview(parse(LAYOUT), str(builtin_model_dir()), "cpu", None, ())
    with_kv = {one["id"]: one["kv_tokens"] for one in planned["instances"] if one["kv_tokens"]}
    assert set(with_kv) == {"P0", "D0"}
    for name, computed_tokens in with_kv.items():
        (line,) = CACHE.findall(launch.stage(name).get("/metrics").text)
        labels = dict(LABEL.findall(line))
        block_tokens, blocks = int(labels["block_size"]), int(labels["num_gpu_blocks"])
        assert abs(block_tokens * blocks - computed_tokens) <= block_tokens, name
