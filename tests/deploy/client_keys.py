"""A file of clients' keys, whose words are known."""

from __future__ import annotations

from pathlib import Path

from proxy.config.keys import written
from tests.proxy.fakes import api_keys


def client_keys(path: Path, *words: str) -> str:
    """Its name. One that is there gets these keys instead."""
    path.touch(mode=0o600)
    path.write_text(written(api_keys(*words)))
    return str(path)
