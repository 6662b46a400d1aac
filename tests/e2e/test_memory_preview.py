"""Real stages get the KV cache that was computed for them before they started."""

from __future__ import annotations

import re

import httpx
import pytest

from deploy.memory_preview import preview
from epd_serve.demo.presets import builtin_model_dir
from epd_serve.layout_parser import parse
from tests.e2e.serving import Serving

LAYOUT = "(E-P)-D"
CACHE = re.compile(r'^vllm:cache_config_info\{.*?block_size="(\d+)".*?num_gpu_blocks="(\d+)".*\}', re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("launch", [LAYOUT], indirect=True)
def test_vllm_makes_of_the_planned_memory_as_many_blocks_as_were_computed(launch: Serving) -> None:
    _, planned = preview(parse(LAYOUT), str(builtin_model_dir()), "cpu", None, ())
    urls = {name: entry["url"] for name, entry in launch.instances().items()}
    with_kv = {one["id"]: one["kv_tokens"] for one in planned["instances"] if one["kv_tokens"]}
    assert set(with_kv) == {"P0", "D0"}
    for name, computed_tokens in with_kv.items():
        (sizes,) = CACHE.findall(httpx.get(f"{urls[name]}/metrics", timeout=10).text)
        block_tokens, blocks = map(int, sizes)
        assert abs(block_tokens * blocks - computed_tokens) <= block_tokens, name
