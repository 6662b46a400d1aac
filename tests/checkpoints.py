"""Model directories of real families at real sizes: configs and safetensors headers, the weights a hole in the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

QWEN25_VL_7B: Mapping[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
"""config.json of Qwen2.5-VL-7B-Instruct, as published, as far as sizes follow from it."""

_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4}


def write_safetensors(path: Path, shapes: Shapes, dtype: str = "BF16") -> int:
    """A file of that many tensors, sparse; the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = _BYTES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + at)
    return at


def qwen25_vl_7b(directory: Path, **config: Any) -> Path:
    """Qwen2.5-VL-7B-Instruct: config and shapes as published, in one file."""
    directory.mkdir(parents=True, exist_ok=True)
    made = {**QWEN25_VL_7B, **config}
    (directory / "config.json").write_text(json.dumps(made))
    processor = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    write_safetensors(directory / "model.safetensors", _qwen25_shapes())
    return directory


def _qwen25_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"visual.patch_embed.proj.weight": (1280, 3, 2, 14, 14)}
    for layer in range(32):
        block = f"visual.blocks.{layer}"
        shapes |= {f"{block}.attn.qkv.weight": (3840, 1280), f"{block}.attn.proj.weight": (1280, 1280)}
        shapes |= {f"{block}.mlp.{name}.weight": (3420, 1280) for name in ("gate_proj", "up_proj", "down_proj")}
    shapes |= {"visual.merger.mlp.0.weight": (5120, 5120), "visual.merger.mlp.2.weight": (3584, 5120)}
    for layer in range(28):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (3584, 3584) for name in "qo"}
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (512, 3584) for name in "kv"}
        shapes |= {f"{block}.mlp.{name}.weight": (18944, 3584) for name in ("gate_proj", "up_proj", "down_proj")}
    return shapes | {"model.embed_tokens.weight": (152064, 3584), "lm_head.weight": (152064, 3584)}
