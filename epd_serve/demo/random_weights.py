"""Fills a model folder with random weights: `python -m epd_serve.demo.random_weights DIR SEED [CHANGES]`.

Owns the drawing. DIR already holds the configs (`epd_serve.demo.presets` writes them and runs this as a process, so
that the CLI stays free of torch). Parameter names and shapes are those of transformers' own class for the
architecture that config.json names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file


def draw_weights(model_dir: Path, seed: int, changes: Mapping[str, Any]) -> int:
    """Write `model_dir/model.safetensors` in bfloat16.

    Matrices are normal with the config's `initializer_range` as standard deviation; norms and biases keep their neutral
    start. Each tensor has its own generator, seeded with (seed, position), so that the result does not depend on how
    transformers builds the model.

    Args:
        changes: `rename_weights` and `transpose_weights` of a family (`epd_serve.demo.families`), where transformers
            writes other names and shapes than published checkpoints have and vLLM reads.

    Returns:
        The number of parameters.
    """
    config = transformers.AutoConfig.from_pretrained(model_dir)
    torch.manual_seed(seed)  # for vectors that a class starts at random (LLaVA's newline)
    model = getattr(transformers, config.architectures[0])(config)
    std = config.get_text_config().initializer_range
    with torch.no_grad():
        for position, (_, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.ndim >= 2:
                parameter.normal_(0.0, std, generator=torch.Generator().manual_seed(seed * 100_003 + position))
    model.to(torch.bfloat16).save_pretrained(model_dir)
    if changes:
        renames, transposed = changes.get("rename_weights", {}), tuple(changes.get("transpose_weights", ()))
        _change(model_dir / "model.safetensors", renames, transposed)
    return sum(parameter.numel() for parameter in model.parameters())


def _change(weights: Path, renames: Mapping[str, str], transposed: tuple[str, ...]) -> None:
    tensors = {}
    for name, tensor in load_file(weights).items():
        old = next((prefix for prefix in renames if name.startswith(prefix)), "")
        checkpoints = tensor.transpose(-2, -1).contiguous() if name.endswith(transposed) else tensor
        tensors[renames.get(old, "") + name.removeprefix(old)] = checkpoints
    save_file(tensors, weights, metadata={"format": "pt"})


if __name__ == "__main__":
    print(draw_weights(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3] if sys.argv[3:] else "{}")))
