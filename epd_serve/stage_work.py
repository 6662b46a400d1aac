"""How much one reference request computes in each stage, from what a model's config.json says. Pure but for reading it.

The request is EPD-Serve's (§4.1, ShareGPT-4o): one picture of 802x652, 9.6 tokens of text, 64 tokens out. Counted are
multiplications by weights, 2 FLOP per weight and token, and attention's scores and values, 4 FLOP per pair of tokens
and channel. That is the rule of thumb with which rooflines of transformers are drawn; norms, embeddings and
convolutions are below a percent. Weights of experts count as often as they are used.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PICTURE = (802, 652)
TEXT_TOKENS = 10
OUTPUT_TOKENS = 64


@dataclass(frozen=True)
class StageWork:
    """FLOP of the reference request by stage. Decode is all `OUTPUT_TOKENS` tokens."""

    encode: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class _Stack:
    """Transformer layers: weights that a token meets, and channels of attention, over all layers."""

    weights: float
    attended: float

    def flop(self, tokens: float, context: float) -> float:
        return 2 * self.weights * tokens + 4 * self.attended * tokens * context


def read_stage_work(directory: Path) -> StageWork | None:
    """Of the model in a directory; None, and a line in the log, when its config does not say enough (or has no picture
    tower). Families differ in what they call things; whoever asks has a rule for models it knows nothing of."""
    try:
        return _work(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        what = f"{type(error).__name__}: {error}"
        logger.warning("%s: how much each stage computes is not known (%s); shares are equal", directory, what)
        return None


def _work(config: Mapping[str, Any]) -> StageWork:
    config = config.get("thinker_config", config)
    vision = config["vision_config"]
    language = next((config[key] for key in ("text_config", "llm_config") if key in config), config)
    patches, tokens = _picture_tokens(vision)
    prompt = tokens + TEXT_TOKENS
    tower, model = _tower(vision), _language(language)
    head = _Stack(_number(language, "vocab_size") * _number(language, "hidden_size"), 0)
    return StageWork(
        encode=tower.flop(patches, patches),
        prefill=model.flop(prompt, prompt / 2) + head.flop(1, 0),  # causal: half of all pairs
        decode=model.flop(OUTPUT_TOKENS, prompt + OUTPUT_TOKENS / 2) + head.flop(OUTPUT_TOKENS, 0),
    )


def _picture_tokens(vision: Mapping[str, Any]) -> tuple[float, float]:
    """Patches the tower sees, and tokens the language model gets. Towers without `spatial_merge_size` have one size."""
    patch = _number(vision, "patch_size", "spatial_patch_size")
    if "spatial_merge_size" in vision:
        merge = _number(vision, "spatial_merge_size")
        columns, rows = (max(1, round(side / (patch * merge))) for side in PICTURE)
        return columns * rows * merge**2, columns * rows
    patches = (_number(vision, "image_size") / patch) ** 2
    return patches, patches


def _tower(vision: Mapping[str, Any]) -> _Stack:
    # Qwen2-VL says `embed_dim`, and calls the language model's width `hidden_size`.
    width = _number(vision, "embed_dim", "hidden_size")
    layers = _number(vision, "depth", "num_hidden_layers")
    inner = (
        _number(vision, "intermediate_size") if "intermediate_size" in vision else width * _number(vision, "mlp_ratio")
    )
    gated = str(vision.get("hidden_act", "")).startswith("silu")
    return _Stack(layers * (4 * width**2 + (3 if gated else 2) * width * inner), layers * width)


def _language(language: Mapping[str, Any]) -> _Stack:
    width = _number(language, "hidden_size")
    layers = _number(language, "num_hidden_layers")
    heads = _number(language, "num_attention_heads")
    kv_heads = _number(language, "num_key_value_heads") if language.get("num_key_value_heads") else heads
    channels = _number(language, "head_dim") if language.get("head_dim") else width / heads
    attention = width * channels * (2 * heads + 2 * kv_heads)
    if language.get("num_experts_per_tok") and language.get("moe_intermediate_size"):
        used = _number(language, "num_experts_per_tok")
        inner = used * _number(language, "moe_intermediate_size") + (
            language.get("shared_expert_intermediate_size") or 0
        )
    else:
        inner = _number(language, "intermediate_size")
    return _Stack(layers * (attention + 3 * width * inner), layers * heads * channels)


def _number(config: Mapping[str, Any], *names: str) -> float:
    """The first of these that is there. Raises KeyError, or ValueError for what is no size."""
    value = config[next((name for name in names if name in config), names[-1])]
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{names[0]} is {value!r}")
    return float(value)
