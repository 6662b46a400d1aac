"""The demo model's architecture and picture processor: Qwen3-VL in small, and the files that say so.

Owns the sizes and the JSON files of the model folder that follow from them. Leaves to others: tokens (`tokenizer`),
the computation (`network`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATCH = 16
MERGE = 2
FACTOR = PATCH * MERGE  # pixels per picture token, each way
MIN_PIXELS = 24 * FACTOR**2
MAX_PIXELS = 38 * FACTOR**2  # a square picture is 6x6 tokens: every cell of the 3x3 grid has 2x2 of its own
TRAINING = "training.json"  # of a model folder: plan, steps and CPU seconds of its training
_MOST_FRAMES = 8  # of a video


@dataclass(frozen=True)
class Architecture:
    """Sizes. Heads are 64 wide in both parts: what every attention backend takes, vllm-ascend's included."""

    hidden: int = 128
    intermediate: int = 384
    head_dim: int = 64
    text_layers: int = 4
    text_heads: int = 4
    text_kv_heads: int = 2
    rope_theta: float = 10_000.0
    mrope_section: tuple[int, int, int] = (12, 10, 10)
    vision_layers: int = 3
    vision_heads: int = 2
    deepstack: int = 1  # index of the vision layer whose output joins the text's first layer
    positions_per_side: int = 16
    epsilon: float = 1e-6


DEMO = Architecture()


def picture_grid(width: int, height: int) -> tuple[int, int]:
    """(rows, columns) of patches after the processor's resizing: transformers' `smart_resize` with our bounds."""
    rows, columns = round(height / FACTOR), round(width / FACTOR)
    if rows * columns * FACTOR**2 > MAX_PIXELS:
        shrink = math.sqrt(height * width / MAX_PIXELS)
        rows, columns = (max(1, math.floor(side / shrink / FACTOR)) for side in (height, width))
    elif rows * columns * FACTOR**2 < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        rows, columns = (math.ceil(side * grow / FACTOR) for side in (height, width))
    return rows * MERGE, columns * MERGE


def config(sizes: Architecture, vocabulary: int, ids: dict[str, int]) -> dict[str, Any]:
    """The content of config.json; `ids` are those of the special tokens."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "head_dim": sizes.head_dim,
            "hidden_act": "silu",
            "hidden_size": sizes.hidden,
            "initializer_range": 0.05,
            "intermediate_size": sizes.intermediate,
            "max_position_embeddings": 8192,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": sizes.text_heads,
            "num_hidden_layers": sizes.text_layers,
            "num_key_value_heads": sizes.text_kv_heads,
            "pad_token_id": ids["<|endoftext|>"],
            "rms_norm_eps": sizes.epsilon,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": list(sizes.mrope_section),
                "rope_theta": sizes.rope_theta,
                "rope_type": "default",
            },
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": vocabulary,
        },
        "tie_word_embeddings": False,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [sizes.deepstack],
            "depth": sizes.vision_layers,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": sizes.hidden,
            "in_channels": 3,
            "initializer_range": 0.05,
            "intermediate_size": sizes.intermediate,
            "model_type": "qwen3_vl_vision",
            "num_heads": sizes.vision_heads,
            "num_position_embeddings": sizes.positions_per_side**2,
            "out_hidden_size": sizes.hidden,
            "patch_size": PATCH,
            "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "axial"},
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def write_configs(folder: Path, sizes: Architecture, vocabulary: int, ids: dict[str, int]) -> None:
    """Write config.json, generation_config.json and the two processors' files."""
    processor = {
        "size": {"longest_edge": MAX_PIXELS, "shortest_edge": MIN_PIXELS},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    video = {
        **processor,
        "size": {"longest_edge": MAX_PIXELS * _MOST_FRAMES, "shortest_edge": MIN_PIXELS},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    files = {
        "config.json": config(sizes, vocabulary, ids),
        "generation_config.json": {"_from_model_config": True, **ends, "use_cache": True},
        "preprocessor_config.json": processor,
        "video_preprocessor_config.json": video,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
