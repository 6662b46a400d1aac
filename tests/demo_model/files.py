"""Files of the training's command line: whole or absent, and known to be writable before hours of work.

Owns both for text. Leaves to others: what is written, and checkpoints, which torch writes (`checkpoints`).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from epd_serve.errors import ConfigError


def prepare(folder: Path, param: str) -> None:
    """Make the folder if there is none.

    Raises:
        ConfigError: it cannot be made or written into, or is a file; names `param`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error}", param=param) from error


def write(path: Path, text: str, param: str) -> None:
    """Replace the file at once.

    Raises:
        ConfigError: it cannot be written; names `param`.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", param=param) from error
    finally:
        draft.unlink(missing_ok=True)
