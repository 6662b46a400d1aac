"""What stages that really start say of their memory, beside what was computed before: the check of the memory tables.

On CPU a stage is told its KV cache in bytes, so the blocks that its vLLM makes of it check the bytes of a token. The
weights of a role show in the private memory of its engine's process, beside all that vLLM itself takes: only the
difference between a stage with a language model and an encoder means anything, and for small presets little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.served import Served, served
from deploy.memory_preview import preview
from deploy.placement_table import table
from epd_serve.errors import StageError
from epd_serve.layout_parser import parse

LAYOUT = "E-P-D"
LOOK_S = 10.0
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Started:
    """An instance of a preset. `computed_kv_tokens`, `kv_tokens`: 0 without a KV cache; the rest in bytes.

    `private_bytes`: of its engine's processes, 0 where they cannot be read.
    """

    preset: str
    instance: str
    computed_kv_tokens: int
    kv_tokens: int
    block_tokens: int
    computed_weights: int
    private_bytes: int

    @property
    def agrees(self) -> bool:
        """The blocks are those computed, but for the part of one."""
        return abs(self.computed_kv_tokens - self.kv_tokens) <= max(1, self.block_tokens)

    def row(self) -> dict[str, Any]:
        return {
            "kind": "real",
            "preset": self.preset,
            "instance": self.instance,
            "computed_kv_tokens": self.computed_kv_tokens,
            "kv_tokens": self.kv_tokens,
            "block_tokens": self.block_tokens,
            "computed_weights_bytes": self.computed_weights,
            "private_bytes": self.private_bytes,
            "agrees": self.agrees,
        }


def check(preset: str, folder: Path) -> list[Started]:
    """Start the preset's stages and ask them. Raises StageError, ConfigError."""
    _, shown = preview(parse(LAYOUT), str(folder), "cpu", None, ())
    computed = {one["id"]: one for one in shown["instances"]}
    with served(LAYOUT, (str(folder),), name=preset, traced=False) as launch:
        return [_started(preset, launch, stage.instance, stage.port, computed) for stage in launch.stages]


def figures(found: Sequence[Started]) -> dict[str, float]:
    """`check/PRESET/INSTANCE/…`, of those with a KV cache: tokens over those computed."""
    return {
        f"check/{one.preset}/{one.instance}/kv_tokens_over_computed": round(one.kv_tokens / one.computed_kv_tokens, 5)
        for one in found
        if one.computed_kv_tokens
    }


def shown(found: Sequence[Started]) -> str:
    rows: list[tuple[str, ...]] = [
        ("preset", "instance", "KV tokens", "computed", "weights MB, computed", "private MB, real", "KV agrees")
    ]
    rows += [
        (
            one.preset,
            one.instance,
            f"{one.kv_tokens:,}" if one.computed_kv_tokens else "-",
            f"{one.computed_kv_tokens:,}" if one.computed_kv_tokens else "-",
            f"{one.computed_weights / 1e6:.1f}",
            f"{one.private_bytes / 1e6:.0f}" if one.private_bytes else "-",
            ("yes" if one.agrees else "NO") if one.computed_kv_tokens else "-",
        )
        for one in found
    ]
    return table(rows)


def kv_of(metrics: str) -> tuple[int, int]:
    """(blocks, tokens of a block) of vLLM's `cache_config_info`; zeros where it has none.

    Raises:
        StageError: the metric is there, and is not as it was.
    """
    line = next((one for one in metrics.splitlines() if one.startswith("vllm:cache_config_info{")), "")
    if not line:
        return 0, 0
    labels = dict(_LABEL.findall(line))
    try:
        blocks, size = labels["num_gpu_blocks"], labels["block_size"]
        return (0 if blocks == "None" else int(blocks)), (0 if size == "None" else int(size))
    except (KeyError, ValueError):
        raise StageError(f"vLLM says of its KV cache: {line[:200]}", stage="vLLM") from None


def _started(preset: str, launch: Served, instance: str, port: int, computed: Mapping[str, Any]) -> Started:
    url = f"http://127.0.0.1:{port}/metrics"
    try:
        text = httpx.get(url, timeout=LOOK_S, trust_env=False).raise_for_status().text
    except httpx.HTTPError as error:
        raise StageError(f"{url}: {error!r}", stage=instance) from error
    own = computed[instance]
    blocks, size = kv_of(text) if own["kv_tokens"] else (0, 0)
    private = sum(map(_private_bytes, launch.cpu_parts.get(f"{instance}/engine", ())))
    return Started(preset, instance, own["kv_tokens"], blocks * size, size, own["weights_bytes"], private)


def _private_bytes(pid: int) -> int:
    """Anonymous memory of a process; 0 where it cannot be read."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
