"""A trained network as a model folder that transformers and vLLM load.

Owns the folder's completeness: weights in bfloat16, configs, tokenizer, chat template. Leaves to others: the model card
(`card`), which needs an evaluation.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from epd_serve.demo.training.architecture import DEMO, Architecture, write_configs
from epd_serve.demo.training.network import Network, checkpoint_tensors
from epd_serve.demo.training.tokenizer import Encoder, write_tokenizer
from epd_serve.errors import ConfigError

MOST_BYTES = 8_000_000  # of the weights inside the package


def export(network: Network, encoder: Encoder, folder: Path, sizes: Architecture = DEMO) -> None:
    """Write the model folder, whole or not at all.

    Raises:
        ConfigError: the folder is in use.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new one", param="--model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        built = Path(scratch) / "model"
        built.mkdir()
        save_file(checkpoint_tensors(network, torch.bfloat16), built / "model.safetensors", metadata={"format": "pt"})
        (built / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
        weights = (built / "model.safetensors").stat().st_size
        assert weights <= MOST_BYTES, f"the weights take {weights} bytes"
        write_configs(built, sizes, encoder.vocabulary, encoder.ids)
        write_tokenizer(built, encoder.tokenizer)
        built.replace(folder)
