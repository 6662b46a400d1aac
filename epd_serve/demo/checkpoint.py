"""Writes the checkpoint of a model folder: `python -m epd_serve.demo.checkpoint DIR random SEED [CHANGES]`, or
`… DIR hollow`.

DIR already holds the configs (`epd_serve.demo.presets` writes them and runs this as a process, so that the CLI stays
free of torch). Parameter names and shapes are those of transformers' own class for the architecture that config.json
names.
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

BYTES = 2  # of a bfloat16
ALIGNMENT = 8  # of where the weights begin, as safetensors writes files


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


def write_hollow(model_dir: Path) -> int:
    """Write a `model_dir/model.safetensors` that tells the names and sizes of all weights in bfloat16, which is what
    memory is planned with, and is a hole in the file system otherwise: it takes no disk and reads as zeros.

    Served with `--load-format dummy`, where vLLM draws weights of its own. Nothing of the model is allocated here.

    Returns:
        The number of parameters.
    """
    config = transformers.AutoConfig.from_pretrained(model_dir)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    header, end = {}, 0
    for name, weight in model.state_dict().items():
        start, end = end, end + BYTES * weight.numel()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % ALIGNMENT)
    with (model_dir / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return end // BYTES


def main() -> int:
    """Returns the number of parameters that were written."""
    directory, kind, *more = sys.argv[1:]
    if kind == "hollow":
        return write_hollow(Path(directory))
    seed, changes = int(more[0]), json.loads(more[1] if more[1:] else "{}")
    return draw_weights(Path(directory), seed, changes)


if __name__ == "__main__":
    print(main())
