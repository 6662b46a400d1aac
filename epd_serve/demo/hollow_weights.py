"""Gives a model folder weights that are none: `python -m epd_serve.demo.hollow_weights DIR`.

`model.safetensors` tells the names and sizes of all weights in bfloat16, which is what memory is planned with, and is a
hole in the file system otherwise: it takes no disk and reads as zeros. Served with `--load-format dummy`, where vLLM
draws weights of its own. DIR already holds the configs; nothing of the model is allocated here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

BYTES = 2  # of a bfloat16
ALIGNMENT = 8  # of where the weights begin, as safetensors writes files


def write_hollow(model_dir: Path) -> int:
    """Write `model_dir/model.safetensors`. Returns the number of parameters."""
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


if __name__ == "__main__":
    print(write_hollow(Path(sys.argv[1])))
