"""A trained network as a model folder that transformers and vLLM load, and back.

Owns the folder's completeness: weights in bfloat16, configs, tokenizer, chat template, what the training was. Leaves to
others: the model card (`card`), which needs an evaluation.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from epd_serve.errors import ConfigError
from tests.demo_model.architecture import DEMO, TRAINING, Architecture, write_configs
from tests.demo_model.network import Network, checkpoint_tensors
from tests.demo_model.tokenizer import Encoder, write_tokenizer

WEIGHTS = "model.safetensors"
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
            save_file(tensors, built / WEIGHTS, metadata={"format": "pt"})
            (built / WEIGHTS).chmod(0o644)  # safetensors writes it for its owner alone
            weights = (built / WEIGHTS).stat().st_size
            assert weights <= MOST_BYTES, f"the weights take {weights} bytes"
            write_configs(built, sizes, encoder.vocabulary, encoder.ids)
            write_tokenizer(built, encoder.tokenizer)
            (built / TRAINING).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
            if replace and folder.exists():
                folder.rename(Path(scratch) / "before")
            built.replace(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {folder}: {error}", param=flag) from error


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights of a model folder.

    Raises:
        ConfigError: it has none.
    """
    try:
        return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{folder} is no model folder that train or export wrote: {error}", param="--from") from error


def begin_with(network: Network, encoder: Encoder, folder: Path) -> dict[str, Any]:
    """Load the weights of a model folder that was written here; returns what is known of their training.

    Raises:
        ConfigError: it is none, or its tokens mean other words.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        weights = load_file(folder / WEIGHTS)
        about = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
        if Encoder(tokenizer).digest != encoder.digest:
            raise ConfigError(f"{folder} was trained with other wordings, its tokens mean other words", param="--from")
        network.load_state_dict(weights)
        return dict(about)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{folder} is no model folder that train or export wrote: {error}", param="--from") from error
