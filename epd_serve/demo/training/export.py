"""A trained network as a model folder that transformers and vLLM load.

Owns the folder's completeness: weights in bfloat16, configs, tokenizer, chat template, what the training was. Leaves to
others: the model card (`card`), which needs an evaluation.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from epd_serve.demo.training.architecture import DEMO, TRAINING, Architecture, write_configs
from epd_serve.demo.training.network import Network, checkpoint_tensors
from epd_serve.demo.training.tokenizer import Encoder, write_tokenizer
from epd_serve.errors import ConfigError

MOST_BYTES = 8_000_000  # of the weights inside the package


def export(
    network: Network,
    encoder: Encoder,
    folder: Path,
    about: Mapping[str, Any],
    *,
    replace: bool = False,
    sizes: Architecture = DEMO,
) -> None:
    """Write the model folder, whole or not at all.

    Args:
        network, encoder: what is written.
        folder: a new or empty one; with `replace` also one that was written here before, which goes when the new one
            is whole.
        about: how it was trained: `training.json`, of which `card` reads.
        sizes: those of `network`.

    Raises:
        ConfigError: the folder is in use, or cannot be written.
    """
    flag = "--out" if replace else "--model"
    try:
        if folder.exists() and any(folder.iterdir()) and not (replace and (folder / TRAINING).exists()):
            raise ConfigError(f"{folder} is not empty: move it away, or name another", param=flag)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            built = Path(scratch) / "model"
            built.mkdir()
            tensors = checkpoint_tensors(network, torch.bfloat16)
            save_file(tensors, built / "model.safetensors", metadata={"format": "pt"})
            (built / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
            weights = (built / "model.safetensors").stat().st_size
            assert weights <= MOST_BYTES, f"the weights take {weights} bytes"
            write_configs(built, sizes, encoder.vocabulary, encoder.ids)
            write_tokenizer(built, encoder.tokenizer)
            (built / TRAINING).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
            if replace and folder.exists():
                folder.rename(Path(scratch) / "before")
            built.replace(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {folder}: {error}", param=flag) from error
