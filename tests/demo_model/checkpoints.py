"""Checkpoints of a training run: a file that is whole or absent.

Owns the file. A checkpoint holds everything that the next step depends on; batches need none of it, they follow from
the seed and the step's number (`batches`). Whether a plan may go on from it is `train`'s to say.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from epd_serve.errors import ConfigError
from tests.demo_model import files

NAME = "checkpoint.pt"
_KEYS = {"plan", "step", "cpu_s", "before", "tokenizer", "modules", "optimizers"}


def save(folder: Path, content: dict[str, Any]) -> None:
    """Replace the folder's checkpoint at once: a run that is killed while it writes leaves the one before.

    Raises:
        ConfigError: it cannot be written.
    """
    assert set(content) == _KEYS, set(content)
    files.prepare(folder, "--out")
    scratch = folder / f".{NAME}.{os.getpid()}"
    try:
        torch.save(content, scratch)
        scratch.replace(folder / NAME)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise ConfigError(f"cannot write {folder / NAME}: {error}", param="--out") from error
    finally:
        scratch.unlink(missing_ok=True)


def load(folder: Path) -> dict[str, Any] | None:
    """The folder's checkpoint, None where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / NAME
    if not path.exists():
        return None
    if not zipfile.is_zipfile(path):  # what torch writes; its unpickler raises anything at anything else
        raise ConfigError(f"{path} is no checkpoint or half of one: remove it to start anew", param="--out")
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigError(f"cannot read {path} ({error}): remove it to start anew", param="--out") from error
    if not isinstance(content, dict) or set(content) != _KEYS:
        raise ConfigError(f"{path} is no checkpoint of this program: remove it to start anew", param="--out")
    return content
